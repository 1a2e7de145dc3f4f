"""Headers and counters: no byte is called usable that was not checked."""

import struct
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest

from hicache.errors import ClosedError, StorageError
from hicache.storage import PageStore
from hicache.storage.chains import FORMAT_VERSION
from hicache.storage.codec import HEADER_BYTES, Verdict, check, checksum, decode_header, encode_header, pool_digest
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import (
    Fault,
    FaultyBackend,
    HeldBackend,
    MeteredBackend,
    Operation,
    page_faults,
    seeded_faults,
)
from hicache.testing.storage import sample_chain
from tests.storage.support import PAGE_BYTES, load_pages, page, store_pages

[KEY] = sample_chain(1)


def test_the_checksum_is_crc_32c():
    assert checksum(b"123456789") == 0xE3069283


def test_a_header_says_whose_page_it_is():
    header = encode_header(KEY, page(KEY))
    info = decode_header(memoryview(header))
    assert len(header) == HEADER_BYTES
    assert info is not None
    assert (info.namespace, info.page, info.parent) == (KEY.namespace, KEY.page, KEY.parent)
    assert (info.pool_digest, info.payload_bytes) == (pool_digest("kv"), PAGE_BYTES)
    assert check(KEY, memoryview(header), page(KEY)) is Verdict.GOOD
    assert decode_header(memoryview(header)[1:]) is None


def test_every_bit_of_a_header_counts():
    header = bytearray(encode_header(KEY, page(KEY)))
    payload = page(KEY)
    for bit in range(len(header) * 8):
        header[bit // 8] ^= 1 << bit % 8
        assert check(KEY, memoryview(header), payload) is not Verdict.GOOD, bit
        header[bit // 8] ^= 1 << bit % 8


def test_every_bit_of_a_payload_counts():
    payload = memoryview(bytearray(page(KEY, 40)))
    header = memoryview(encode_header(KEY, payload))
    for bit in range(payload.nbytes * 8):
        payload[bit // 8] ^= 1 << bit % 8
        assert check(KEY, header, payload) is Verdict.CORRUPT
        payload[bit // 8] ^= 1 << bit % 8
    assert check(KEY, header, payload) is Verdict.GOOD


def test_pages_of_others_are_not_ours():
    header, payload = memoryview(encode_header(KEY, page(KEY))), page(KEY)
    other = bytes(32)
    for key in (
        replace(KEY, namespace=other),
        replace(KEY, pool="state"),
        replace(KEY, page=other),
        replace(KEY, parent=other),
    ):
        assert check(key, header, payload) is Verdict.OTHER
    assert check(KEY, header, payload[:-1]) is Verdict.OTHER


def test_another_version_is_foreign_though_its_checksums_are_right():
    header = bytearray(encode_header(KEY, page(KEY)))
    header[8:12] = struct.pack("<I", FORMAT_VERSION + 1)
    header[-4:] = struct.pack("<I", checksum(header[:-4]))
    assert check(KEY, memoryview(header), page(KEY)) is Verdict.FOREIGN


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.STALE])
def test_wrong_bytes_that_the_backend_calls_ok_are_damage(fault: Fault):
    keys = sample_chain(3)
    backend = FaultyBackend(MemoryBackend(), page_faults(Operation.READ, {}))
    store = PageStore(backend)
    store_pages(store, keys)
    backend.choose = page_faults(Operation.READ, {keys[1].page: fault})
    assert load_pages(store, keys) == [True, False, True]
    backend.choose = page_faults(Operation.READ, {})
    assert store.contains(keys).tolist() == [True, False, True]
    assert store_pages(store, keys) == [True] * 3
    assert load_pages(store, keys) == [True] * 3
    stats = store.stats()
    assert (stats.read_pages, stats.damaged_pages, stats.written_pages, stats.skipped_pages) == (5, 1, 4, 2)


def test_a_page_that_was_stored_wrong_is_found_out():
    keys = sample_chain(2)
    backend = FaultyBackend(MemoryBackend(), page_faults(Operation.WRITE, {keys[0].page: Fault.FLIP}))
    store = PageStore(backend)
    assert store_pages(store, keys) == [True, True]
    assert load_pages(store, keys) == [False, True]


def test_counters_count_what_happened():
    keys = sample_chain(4)
    metered = MeteredBackend(MemoryBackend())
    faulty = FaultyBackend(metered, page_faults(Operation.WRITE, {keys[3].page: Fault.FAIL}))
    store = PageStore(faulty)
    assert store_pages(store, keys) == [True, True, True, False]
    assert store_pages(store, keys[:1]) == [True]
    faulty.choose = page_faults(Operation.READ, {keys[0].page: Fault.FAIL, keys[1].page: Fault.MISS})
    assert load_pages(store, keys) == [False, False, True, False]
    stats = store.stats()
    assert (stats.written_pages, stats.written_bytes) == (3, 3 * PAGE_BYTES)
    assert (stats.skipped_pages, stats.write_failed_pages) == (1, 1)
    assert (stats.read_pages, stats.read_bytes) == (1, PAGE_BYTES)
    assert (stats.missed_pages, stats.damaged_pages, stats.read_failed_pages) == (2, 0, 1)
    assert metered.meters[Operation.WRITE].value_bytes == 3 * (PAGE_BYTES + HEADER_BYTES)
    assert metered.meters[Operation.WRITE].good_pages == 3


def test_a_store_that_is_gone_is_an_error():
    store = PageStore(FaultyBackend(MemoryBackend(), page_faults(Operation.READ, {KEY.page: Fault.RAISE})))
    with pytest.raises(StorageError, match="planned failure of read"):
        load_pages(store, [KEY])


def test_a_closed_store_says_so():
    store = PageStore(MemoryBackend())
    store.close()
    store.close()
    with pytest.raises(ClosedError, match="page store is closed"):
        store.contains([KEY])


def test_a_seed_replays_its_faults():
    rates = {Fault.MISS: 0.3, Fault.FLIP: 0.3}
    runs = [[choose(Operation.READ, KEY) for _ in range(200)] for choose in (seeded_faults(7, rates) for _ in range(2))]
    assert runs[0] == runs[1]
    assert {Fault.MISS, Fault.FLIP, None} == set(runs[0])


def test_closing_waits_for_what_is_under_way():
    held = HeldBackend(MemoryBackend())
    store = PageStore(held)
    held.hold(Operation.WRITE)
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(store_pages, store, [KEY])
        assert held.wait_until_held(Operation.WRITE)
        closing = threads.submit(store.close)
        ended, _ = wait([closing], 0.1)
        held.release(Operation.WRITE)
        assert not ended
        assert writing.result() == [True]
        closing.result()
