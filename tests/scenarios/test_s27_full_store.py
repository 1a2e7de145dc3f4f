"""S27: three times the cap is written; the disk is full; there are many pages."""

import errno
from pathlib import Path

from hicache.storage import PageStore
from hicache.storage.file import FileBackend
from hicache.testing.storage import sample_chain
from tests.storage.support import FailingDisk, FakeClock, disk_bytes, files_below, load_pages, store_pages, value_bytes

PAGE_BYTES = 100_000
CAP_BYTES = 10_000_000


def test_three_times_the_cap(tmp_path: Path):
    store = PageStore(FileBackend(tmp_path, CAP_BYTES))
    for i in range(30):
        assert store_pages(store, sample_chain(10, chain=str(i)), PAGE_BYTES) == [True] * 10
        assert disk_bytes(tmp_path) <= CAP_BYTES
    assert value_bytes(tmp_path) > CAP_BYTES - 2 * PAGE_BYTES
    assert load_pages(store, sample_chain(10, chain="29"), PAGE_BYTES) == [True] * 10
    assert not store.contains(sample_chain(10, chain="0")).any()
    store.close()


def test_a_full_disk_pauses_the_store_and_says_so(tmp_path: Path):
    disk, clock = FailingDisk(), FakeClock()
    store = PageStore(FileBackend(tmp_path, CAP_BYTES, disk=disk, clock_s=clock))
    keys = sample_chain(4)
    store_pages(store, keys[:2])
    disk.errors["write"] = errno.ENOSPC
    assert store_pages(store, keys) == [True, True, False, False]
    assert "No space left on device (ENOSPC)" in store.health()[0]
    assert load_pages(store, keys) == [True, True, False, False]
    disk.errors.clear()
    clock.now_s += 60.0
    assert store_pages(store, keys) == [True] * 4
    assert store.health() == ()
    store.close()


def test_look_ups_cost_the_same_in_a_large_store(tmp_path: Path):
    """Counted in file system calls: one for all pages of a size; and there are few files, whatever is stored."""
    disk = FailingDisk()
    store = PageStore(FileBackend(tmp_path, disk=disk))
    wanted = sample_chain(5, chain="wanted")
    costs = []
    for chains in (1, 60):
        for i in range(chains):
            store_pages(store, sample_chain(40, chain=f"{chains} {i}"), 10)
        store_pages(store, wanted, 10)
        before = dict(disk.calls)
        assert store.contains([*wanted, *sample_chain(20, chain="unknown")]).sum() == 5
        costs.append({name: count - before.get(name, 0) for name, count in disk.calls.items()})
    assert [sum(cost.values()) for cost in costs] == [cost["size"] for cost in costs] == [1, 1]
    assert len(files_below(tmp_path)) == 5
    store.close()
