"""The byte cap holds at every moment, and what it costs are tails of chains that were used longest ago."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hicache.storage import PageStore, StorageBackend
from hicache.storage.file import FileBackend
from hicache.storage.file.disk import Disk
from hicache.storage.memory import MemoryBackend
from hicache.testing.storage import sample_chain
from tests.storage.support import PAGE_BYTES, SLOT_BYTES, disk_bytes, load_pages, set_used, store_pages, value_bytes

EXTENTS_BYTES = 4 * 4096
"""What the file system may need to keep track of four files full of holes."""

BACKENDS: list[Callable[[Path, int], StorageBackend]] = [
    lambda folder, pages: FileBackend(folder, pages * SLOT_BYTES),
    lambda folder, pages: MemoryBackend(pages * (PAGE_BYTES + 256)),
]


@pytest.fixture(params=BACKENDS, ids=["file", "memory"])
def make(request, tmp_path: Path):
    return lambda pages: PageStore(request.param(tmp_path / "store", pages))


def test_the_oldest_chain_goes_and_from_its_tail(make):
    store = make(8)
    old, young, new = (sample_chain(4, chain=name) for name in ("old", "young", "new"))
    store_pages(store, old)
    store_pages(store, young)
    assert store_pages(store, new[:2]) == [True, True]
    assert store.contains(old).tolist() == [True, True, False, False]
    assert store.contains(young).all()
    store.close()


def test_what_was_read_is_young_again(make):
    store = make(8)
    first, second, new = (sample_chain(4, chain=name) for name in ("first", "second", "new"))
    store_pages(store, first)
    store_pages(store, second)
    load_pages(store, first[3:])
    store_pages(store, new[:3])
    assert store.contains(first).all()
    assert store.contains(second).tolist() == [True, False, False, False]
    store.close()


def test_a_chain_longer_than_the_store_keeps_its_head(make):
    store = make(5)
    keys = sample_chain(9)
    assert store_pages(store, keys) == [True] * 5 + [False] * 4
    assert store.stats().write_failed_pages == 4
    assert store_pages(store, keys[7:]) == [False] * 2, "out of reach, and no reason to push out what is in reach"
    store.delete(keys[3:5])
    assert store_pages(store, keys) == [True] * 5 + [False] * 4
    assert store.health() == (), "a full store is a healthy store"
    store.close()


def test_sidecars_count_and_leave_with_their_page(make):
    store = make(6)
    kv, state, new = sample_chain(3), sample_chain(3, pool="state"), sample_chain(1, chain="b")
    store_pages(store, kv)
    store_pages(store, state)
    assert store_pages(store, new) == [True]
    assert store.contains(kv).tolist() == store.contains(state).tolist() == [True, True, False]
    store.close()


def test_a_branch_keeps_what_it_shares(make):
    store = make(4)
    trunk = sample_chain(3)
    branch = [type(trunk[0])(trunk[0].namespace, "kv", bytes([9] * 32), trunk[0].page)]
    store_pages(store, trunk)
    store_pages(store, branch)
    assert store_pages(store, sample_chain(2, chain="b")) == [True, True]
    assert store.contains(trunk).tolist() == [True, False, False]
    assert store.contains(branch).all()
    store.close()


class MeasuringDisk(Disk):
    """Notes the most bytes that ever lay in the store, looking after each call that may take or give room."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.most_bytes = 0

    def _look(self) -> None:
        self.most_bytes = max(self.most_bytes, disk_bytes(self._root))

    def allocate(self, handle: int, offset: int, size_bytes: int) -> None:
        super().allocate(handle, offset, size_bytes)
        self._look()

    def write(self, handle: int, parts: Sequence[memoryview], offset: int) -> None:
        super().write(handle, parts, offset)
        self._look()


def test_never_more_than_the_cap_also_while_pages_are_written_anew(tmp_path: Path):
    disk = MeasuringDisk(tmp_path)
    cap_bytes = 10 * SLOT_BYTES + 100
    backend = FileBackend(tmp_path, cap_bytes, disk=disk)
    store = PageStore(backend)
    for i in range(12):
        assert any(store_pages(store, sample_chain(3, chain=str(i))))
        backend.write(sample_chain(1, chain=str(i)), [[memoryview(bytes(PAGE_BYTES))]])
        assert backend.used_bytes == value_bytes(tmp_path)
        assert backend.disk_bytes == disk_bytes(tmp_path)
    assert 9 * SLOT_BYTES < disk.most_bytes <= cap_bytes
    store.close()


@pytest.mark.parametrize("seed", range(5))
def test_pages_of_many_sizes_share_one_cap(tmp_path: Path, seed: int):
    """What one size does not need any more goes back to the disk before anything is dropped for another."""
    source = random.Random(seed)
    disk, cap_bytes = MeasuringDisk(tmp_path), 60 * 4096
    backend = FileBackend(tmp_path, cap_bytes, disk=disk)
    store = PageStore(backend)
    for i in range(120):
        size_bytes = source.choice([100, 5000, 20_000, 50_000])
        keys = sample_chain(source.randint(1, 3), chain=str(source.randrange(40)), pool=f"of {size_bytes}")
        if source.random() < 0.2:
            store.delete(keys)
        done = store_pages(store, keys, size_bytes)
        assert done == sorted(done, reverse=True), f"{i}: a tail without its head"
        assert all(yes or size_bytes > 10_000 for yes in done)
        assert backend.used_bytes == value_bytes(tmp_path)
        assert backend.disk_bytes <= disk_bytes(tmp_path) <= backend.disk_bytes + EXTENTS_BYTES
        assert backend.disk_bytes <= cap_bytes
    assert cap_bytes // 2 < disk.most_bytes <= cap_bytes + EXTENTS_BYTES
    store.close()


def test_a_page_of_another_size_takes_the_room_of_deleted_ones_not_of_stored_ones(tmp_path: Path):
    store = PageStore(FileBackend(tmp_path, 8 * 4096))
    kept, gone = sample_chain(2, chain="kept"), sample_chain(4, chain="gone")
    store_pages(store, [*kept, *gone], 3000)
    store.delete(gone[2:])
    assert store_pages(store, sample_chain(1, chain="big"), 10_000) == [True]
    assert store.contains([*kept, *gone]).tolist() == [True] * 4 + [False] * 2
    assert disk_bytes(tmp_path) <= 8 * 4096
    store.close()


def test_old_files_count_and_a_smaller_cap_is_kept_from_the_start(tmp_path: Path):
    keys = sample_chain(10)
    store = PageStore(FileBackend(tmp_path))
    store_pages(store, keys)
    store.close()
    backend = FileBackend(tmp_path, 4 * SLOT_BYTES)
    assert backend.used_bytes == value_bytes(tmp_path) == disk_bytes(tmp_path) == 4 * SLOT_BYTES
    assert backend.contains(keys).tolist() == [True] * 4 + [False] * 6
    backend.close()


def test_a_much_smaller_cap_is_kept_in_turns(tmp_path: Path, monkeypatch):
    """As many as are needed, and what is being written elsewhere stays."""
    monkeypatch.setattr("hicache.storage.file.room._EVICTED_AT_ONCE", 3)
    store = PageStore(FileBackend(tmp_path))
    chains = [sample_chain(5, chain=str(i)) for i in range(6)]
    for keys in chains:
        store_pages(store, keys)
        store_pages(store, sample_chain(1, chain=keys[0].page.hex()), 20_000)
    store.close()
    backend = FileBackend(tmp_path, 12 * SLOT_BYTES)
    assert 7 * SLOT_BYTES < backend.used_bytes <= backend.disk_bytes <= 12 * SLOT_BYTES
    assert disk_bytes(tmp_path) <= 12 * SLOT_BYTES + EXTENTS_BYTES
    for keys in chains:
        there = backend.contains(keys).tolist()
        assert there == sorted(there, reverse=True)
    backend.close()
    backend = FileBackend(tmp_path, 1)
    assert backend.used_bytes == backend.disk_bytes == 0
    backend.close()


def test_what_was_used_last_is_remembered_over_a_restart(tmp_path: Path):
    first, second = sample_chain(2, chain="first"), sample_chain(2, chain="second")
    store = PageStore(FileBackend(tmp_path))
    store_pages(store, first)
    store_pages(store, second)
    store.close()
    for i, key in enumerate([*first, *second]):
        set_used(tmp_path, key, 1000 + i)
    store = PageStore(FileBackend(tmp_path))
    assert load_pages(store, first) == [True, True]
    store.close()
    store = PageStore(FileBackend(tmp_path, 4 * SLOT_BYTES))
    store_pages(store, sample_chain(1, chain="new"))
    assert store.contains(first).all()
    assert store.contains(second).tolist() == [True, False]
    store.close()
