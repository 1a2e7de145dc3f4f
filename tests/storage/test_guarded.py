"""Reading and writing are paused apart; a paused side answers at once, and the store hears nothing."""

import numpy as np
import pytest

from hicache.errors import StorageError
from hicache.keys import page_keys
from hicache.storage import BreakerOptions, BreakerState, PageStore, chain_keys
from hicache.storage.file import FileBackend
from hicache.storage.memory import MemoryBackend
from hicache.storage.protocol import EachPageBackend
from hicache.testing.faults import Fault, FaultyBackend, MeteredBackend, Operation
from tests.world import PAGE, namespace, tokens

FIRST = namespace().fingerprint
KEYS = chain_keys(FIRST, "kv", FIRST, page_keys(FIRST, tokens(*range(4 * PAGE)), PAGE))


def pages(fill: int) -> list[memoryview]:
    return [np.full(8, fill + page, np.uint8).data for page in range(len(KEYS))]


class Guarded:
    """A store that fails where a test says so, behind breakers that open at the second failure."""

    def __init__(self) -> None:
        self.faulty = FaultyBackend(MemoryBackend(), lambda operation, key: None)
        self.meter = MeteredBackend(self.faulty)
        self.store = PageStore(self.meter, BreakerOptions(failures=2, slow_s=60.0, pause_s=60.0))

    def fail(self, *operations: Operation, fault: Fault = Fault.FAIL) -> None:
        self.faulty.choose = lambda operation, key: fault if operation in operations else None

    def calls(self) -> int:
        return sum(meter.calls for meter in self.meter.meters.values())


def test_a_store_that_takes_nothing_is_still_read_from():
    guarded = Guarded()
    assert guarded.store.write(KEYS[:2], pages(0)[:2]).all()
    guarded.fail(Operation.WRITE)
    for _ in range(2):
        assert not guarded.store.write(KEYS[2:], pages(0)[2:]).any()
    assert guarded.store.refuses_writes
    assert not guarded.store.refuses_reads
    assert guarded.store.contains(KEYS).tolist() == [True, True, False, False]
    assert guarded.store.read(KEYS[:2], pages(9)[:2]).ok.all()
    assert not guarded.store.write(KEYS[2:], pages(0)[2:]).any()
    assert guarded.meter.meters[Operation.WRITE].calls == 3
    assert guarded.store.health() == ("writing to the store is paused: it failed, or took too long",)
    with pytest.raises(StorageError, match="paused"):
        guarded.store.clear(FIRST)
    assert not guarded.store.delete(KEYS).any()


def test_a_store_that_cannot_be_read_is_not_asked_any_more():
    guarded = Guarded()
    guarded.store.write(KEYS, pages(0))
    guarded.fail(Operation.READ)
    for _ in range(2):
        assert guarded.store.read(KEYS, pages(9)).failed.all()
    before = guarded.calls()
    assert guarded.store.refuses_reads
    assert not guarded.store.contains(KEYS).any()
    assert guarded.store.read(KEYS, pages(9)).failed.all()
    assert guarded.calls() == before
    stats = guarded.store.stats()
    assert (stats.reading.state, stats.reading.opened, stats.reading.refused_calls) == (BreakerState.OPEN, 1, 2)
    assert stats.writing.state is BreakerState.CLOSED


def test_misses_and_single_bad_pages_are_no_failures():
    guarded = Guarded()
    guarded.store.write(KEYS[1:], pages(0)[1:])
    for _ in range(5):
        assert not guarded.store.contains(KEYS[:1]).any()
        assert guarded.store.read(KEYS[:1], pages(9)[:1]).failed.sum() == 0
    bad = KEYS[1].page
    guarded.faulty.choose = lambda operation, key: (
        Fault.FAIL if operation is not Operation.CONTAINS and key.page == bad else None
    )
    for _ in range(5):
        assert guarded.store.read(KEYS[1:], pages(9)[1:]).ok.sum() == 2
    assert guarded.store.health() == ()


def test_lookups_that_raise_are_failures_and_are_still_raised():
    guarded = Guarded()
    guarded.fail(Operation.CONTAINS, fault=Fault.RAISE)
    for _ in range(2):
        with pytest.raises(StorageError):
            guarded.store.contains(KEYS)
    assert guarded.store.refuses_reads
    assert not guarded.store.contains(KEYS).any()


def test_without_options_there_is_no_breaker():
    store = PageStore(FaultyBackend(MemoryBackend(), lambda operation, key: Fault.FAIL))
    for _ in range(9):
        assert store.read(KEYS, pages(0)).failed.all()
    assert not store.refuses_reads
    assert not store.refuses_writes


def test_a_backend_that_takes_single_pages_is_still_called_so(tmp_path):
    store = PageStore(FileBackend(tmp_path), BreakerOptions(failures=1))
    assert isinstance(store._backend, EachPageBackend)
    assert store.write(KEYS, pages(3)).all()
    read = pages(9)
    assert store.read(KEYS, read).ok.all()
    assert read == pages(3)
    store.close()
