"""The wrappers do to a backend what they say, and nothing else."""

import threading

import pytest

from hicache.errors import StorageError
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import (
    Fault,
    FaultyBackend,
    HeldBackend,
    MeteredBackend,
    Operation,
    SlowBackend,
    page_faults,
)
from hicache.testing.storage import get, put, sample_chain


def test_faults_of_each_operation():
    keys = sample_chain(3)
    backend = FaultyBackend(MemoryBackend(), page_faults(Operation.READ, {}))
    for key in keys:
        assert put(backend, key, b"value")
    for operation, call in {
        Operation.CONTAINS: lambda: backend.contains(keys),
        Operation.READ: lambda: backend.read(keys, [[memoryview(bytearray(5))] for _ in keys]).ok,
        Operation.WRITE: lambda: backend.write(keys, [[memoryview(b"other")] for _ in keys]),
        Operation.DELETE: lambda: backend.delete(keys),
    }.items():
        for fault in (Fault.MISS, Fault.FAIL):
            backend.choose = page_faults(operation, {key.page: fault for key in keys})
            assert call().tolist() == [False] * 3
        backend.choose = page_faults(operation, {keys[2].page: Fault.RAISE})
        with pytest.raises(StorageError, match=f"planned failure of {operation.value}"):
            call()
    backend.choose = page_faults(Operation.READ, {})
    assert [get(backend, key, 5) for key in keys] == [b"value"] * 3


def test_a_held_call_waits_until_it_is_released():
    [key] = sample_chain(1)
    backend = HeldBackend(MemoryBackend())
    backend.hold(Operation.WRITE)
    writer = threading.Thread(target=put, args=(backend, key, b"value"))
    writer.start()
    assert backend.wait_until_held(Operation.WRITE)
    assert not backend.contains([key])[0]
    backend.release(Operation.WRITE)
    writer.join()
    assert get(backend, key, 5) == b"value"
    assert not backend.wait_until_held(Operation.WRITE, timeout_s=0.0)


def test_a_slow_call_is_delayed_by_its_size():
    slept: list[float] = []
    backend = SlowBackend(MemoryBackend(), lambda operation, pages: pages * 2.0, slept.append)
    backend.contains(sample_chain(3))
    backend.delete(sample_chain(1))
    assert slept == [6.0, 2.0]


def test_a_meter_counts_calls_pages_and_good_ones():
    keys = sample_chain(3)
    backend = MeteredBackend(MemoryBackend())
    put(backend, keys[0], b"value")
    backend.contains(keys)
    meter = backend.meters[Operation.CONTAINS]
    assert (meter.calls, meter.pages, meter.good_pages, meter.value_bytes) == (1, 3, 1, 0)
    assert backend.meters[Operation.WRITE].value_bytes == 5
