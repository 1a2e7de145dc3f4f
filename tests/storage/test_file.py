"""The file store: damage and its repair, errors and how they pass."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache.storage import Cleared, PageStore
from hicache.storage.codec import HEADER_BYTES
from hicache.storage.file import FileBackend
from hicache.storage.file.disk import Disk
from hicache.testing.storage import SAMPLE_NAMESPACE, get, put, sample_chain
from tests.storage.support import (
    PAGE_BYTES,
    REPOSITORY,
    SLOT_BYTES,
    FailingDisk,
    FakeClock,
    Spot,
    disk_bytes,
    load_pages,
    page,
    spot,
    store_pages,
    value_bytes,
)


def truncate(where: Spot) -> None:
    where.cut(where.value_bytes - 1)


def empty(where: Spot) -> None:
    where.cut(0)


def replace_content(where: Spot) -> None:
    where.overwrite(b"x" * where.value_bytes)


def punch(where: Spot) -> None:
    where.overwrite(bytes(where.value_bytes))


def flip_in_header(where: Spot) -> None:
    where.flip(40)


def flip_in_padding(where: Spot) -> None:
    where.flip(240)


def flip_in_payload(where: Spot) -> None:
    where.flip(256 + PAGE_BYTES - 1)


DAMAGES = [truncate, empty, replace_content, punch, flip_in_header, flip_in_padding, flip_in_payload]


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_page_is_a_counted_miss_and_is_written_again(tmp_path: Path, damage, reopened: bool):
    keys = sample_chain(3)
    store = PageStore(FileBackend(tmp_path))
    store_pages(store, keys)
    assert spot(tmp_path, keys[2]).slot == 2
    damage(spot(tmp_path, keys[2]))
    if reopened:
        store.close()
        store = PageStore(FileBackend(tmp_path))
    assert load_pages(store, keys) == [True, True, False]
    assert store.contains(keys).tolist() == [True, True, False]
    assert (store.stats().read_pages, store.stats().damaged_pages, store.stats().missed_pages) == (2, 1, 0)
    assert store_pages(store, keys) == [True, True, True]
    assert load_pages(store, keys) == [True, True, True]
    store.close()


@pytest.mark.parametrize("damage", [truncate, empty])
def test_a_file_that_is_too_short_is_noticed_without_reading_it(tmp_path: Path, damage):
    keys = sample_chain(3)
    store = PageStore(FileBackend(tmp_path))
    store_pages(store, keys)
    damage(spot(tmp_path, keys[1]))
    assert store.contains(keys).tolist() == [True, False, False]
    assert store_pages(store, keys) == [True, True, True]
    assert load_pages(store, keys) == [True, True, True]
    store.close()


def test_a_good_page_in_the_place_of_another_is_damage(tmp_path: Path):
    keys = sample_chain(2)
    store = PageStore(FileBackend(tmp_path))
    store_pages(store, keys)
    spot(tmp_path, keys[1]).overwrite(spot(tmp_path, keys[0]).content())
    assert load_pages(store, keys) == [True, False]
    assert store.stats().damaged_pages == 1
    store.close()


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("position", [0, 8, 20, 40, 79, 80, 127])
def test_a_damaged_record_is_a_miss_and_its_slot_is_used_again(tmp_path: Path, position: int, reopened: bool):
    """Except where nothing depends on the byte: the time of last use, and padding."""
    keys = sample_chain(3)
    store = PageStore(FileBackend(tmp_path, 3 * SLOT_BYTES))
    store_pages(store, keys)
    index = spot(tmp_path, keys[1]).path.with_suffix(".index")
    content = bytearray(index.read_bytes())
    content[128 + position] ^= 1
    index.write_bytes(content)
    if reopened:
        store.close()
        store = PageStore(FileBackend(tmp_path, 3 * SLOT_BYTES))
    noticed = position < 84 if reopened else position < 16
    assert load_pages(store, keys) == [True, not noticed, True]
    assert store_pages(store, keys) == [True] * 3
    assert load_pages(store, keys) == [True] * 3
    assert disk_bytes(tmp_path) <= 3 * SLOT_BYTES
    store.close()


def test_a_store_that_somebody_removed_says_so_and_a_new_one_is_not_disturbed(tmp_path: Path):
    keys = sample_chain(2)
    store = PageStore(FileBackend(tmp_path / "s", retry_s=0.0))
    store_pages(store, keys[:1])
    shutil.rmtree(tmp_path / "s")
    assert store_pages(store, keys) == [True, False]
    assert "somebody removed the store's files" in store.health()[0]
    other = PageStore(FileBackend(tmp_path / "s"))
    assert store_pages(other, keys) == [True, True]
    assert store_pages(store, keys) == [True, False]
    assert load_pages(other, keys) == [True, True]
    store.close()
    other.close()


def test_a_page_that_is_there_is_not_written_again(tmp_path: Path):
    disk = FailingDisk()
    keys = sample_chain(4)
    store = PageStore(FileBackend(tmp_path, disk=disk))
    store_pages(store, keys[:3])
    assert store_pages(store, keys) == [True] * 4
    assert disk.calls["write"] == 4
    assert (store.stats().written_pages, store.stats().skipped_pages) == (4, 3)
    assert store.stats().written_bytes == 4 * PAGE_BYTES
    store.close()


def test_a_damaged_page_that_cannot_be_removed_is_not_there_and_is_replaced(tmp_path: Path):
    disk, clock = FailingDisk(), FakeClock()
    keys = sample_chain(1)
    store = PageStore(FileBackend(tmp_path, disk=disk, retry_s=5.0, clock_s=clock))
    store_pages(store, keys)
    flip_in_payload(spot(tmp_path, keys[0]))
    disk.errors["note"] = errno.EACCES
    assert load_pages(store, keys) == [False]
    assert store.contains(keys).tolist() == [False]
    assert store_pages(store, keys) == [False]
    disk.errors.clear()
    clock.now_s += 6.0
    assert store.contains(keys).tolist() == [False]
    assert store_pages(store, keys) == [True]
    assert value_bytes(tmp_path) == SLOT_BYTES
    assert load_pages(store, keys) == [True]
    store.close()


@pytest.mark.parametrize("call", ["allocate", "write", "note"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_write_that_fails_pauses_the_store_which_recovers(tmp_path: Path, call: str, code: int):
    disk, clock = FailingDisk(), FakeClock()
    keys = sample_chain(4)
    backend = FileBackend(tmp_path, retry_s=5.0, disk=disk, clock_s=clock)
    store = PageStore(backend)
    assert store_pages(store, keys[:1]) == [True]
    disk.errors[call] = code
    assert store_pages(store, keys) == [True, False, False, False]
    assert store.stats().write_failed_pages == 3
    calls = disk.calls[call]
    [sentence] = store.health()
    assert errno.errorcode[code] in sentence
    assert "writing is paused" in sentence
    assert load_pages(store, keys[:1]) == [True], "reading goes on"

    clock.now_s += 4.9
    store_pages(store, keys)
    assert disk.calls[call] == calls, "nothing is tried while it is paused"
    clock.now_s += 0.2
    store_pages(store, keys)
    assert disk.calls[call] == calls + 1, "one write tries, and pauses again"

    del disk.errors[call]
    clock.now_s += 5.1
    assert store_pages(store, keys) == [True] * 4
    assert store.health() == ()
    assert load_pages(store, keys) == [True] * 4
    assert backend.used_bytes == value_bytes(tmp_path) == 4 * SLOT_BYTES, (
        "what was half written has given its slot back"
    )
    store.close()


def test_a_page_that_cannot_be_read_is_a_failure_and_is_written_again(tmp_path: Path):
    disk, clock = FailingDisk(), FakeClock()
    keys = sample_chain(2)
    store = PageStore(FileBackend(tmp_path, retry_s=5.0, disk=disk, clock_s=clock))
    store_pages(store, keys)
    disk.errors["read"] = errno.EIO
    assert load_pages(store, keys[1:]) == [False]
    assert store.stats().read_failed_pages == 1
    assert store.contains(keys).tolist() == [True, False]
    assert "EIO" in store.health()[0]
    del disk.errors["read"]
    assert store_pages(store, keys) == [True, True]
    assert disk.calls["write"] == 3
    assert load_pages(store, keys) == [True, True]
    clock.now_s += 5.1
    assert store.health() == ()
    store.close()


def test_a_read_that_works_again_clears_the_doubt(tmp_path: Path):
    disk = FailingDisk()
    [key] = sample_chain(1)
    backend = FileBackend(tmp_path, disk=disk)
    put(backend, key, b"value")
    disk.errors["read"] = errno.EMFILE
    assert get(backend, key, 5) is None
    del disk.errors["read"]
    assert get(backend, key, 5) == b"value"
    assert backend.contains([key])[0]
    backend.close()


SHORT_WRITE = """
import resource, sys
from hicache.storage import Cleared, PageStore
from hicache.storage.codec import HEADER_BYTES
from hicache.storage.file import FileBackend
from hicache.testing.storage import sample_chain
from tests.storage.support import load_pages, store_pages, value_bytes
backend = FileBackend(sys.argv[1], retry_s=0.0)
store = PageStore(backend)
small, big = sample_chain(2, chain="small"), sample_chain(2, chain="big")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
assert store_pages(store, big, 200_000) == [False, False]
assert "EFBIG" in store.health()[0]
assert value_bytes(backend.root) == backend.used_bytes == 0
assert store_pages(store, small) == [True, True]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert store_pages(store, big, 200_000) == [True, True]
assert load_pages(store, small) + load_pages(store, big, 200_000) == [True] * 4
"""


def test_the_kernel_stops_a_write_half_way(tmp_path: Path):
    """A limit on file sizes makes pwritev write a part and then fail, as a full disk does."""
    subprocess.run([sys.executable, "-c", SHORT_WRITE, str(tmp_path / "s")], check=True, timeout=60, cwd=REPOSITORY)


def test_short_reads_and_writes_are_carried_on(tmp_path: Path, monkeypatch):
    """The kernel may do less than it is asked to, at every turn."""
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda handle, parts, offset: write(handle, [parts[0][:997]], offset))
    monkeypatch.setattr(os, "preadv", lambda handle, parts, offset: read(handle, [parts[0][:991]], offset))
    keys = sample_chain(3)
    store = PageStore(FileBackend(tmp_path))
    assert store_pages(store, keys) == [True] * 3
    assert load_pages(store, keys) == [True] * 3
    store.close()


def test_opening_reads_no_page_and_looking_up_costs_one_stat_whatever_the_number(tmp_path: Path):
    disk = FailingDisk()
    chains = [sample_chain(10, chain=str(i)) for i in range(30)]
    store = PageStore(FileBackend(tmp_path))
    for keys in chains:
        store_pages(store, keys, 100)
    store.close()
    store = PageStore(FileBackend(tmp_path, disk=disk))
    assert disk.calls.get("read", 0) == 0
    calls = disk.calls["size"]
    assert store.contains(chains[3] + sample_chain(50, chain="unknown")).sum() == 10
    assert disk.calls == {"size": calls + 1}
    store.close()


def test_many_parts(tmp_path: Path):
    [key] = sample_chain(1)
    value = page(key, 2000)
    backend = FileBackend(tmp_path)
    assert backend.write([key], [[value[i : i + 1] for i in range(2000)]]).all()
    buffer = memoryview(bytearray(2000))
    assert backend.read([key], [[buffer[i : i + 1] for i in range(2000)]]).ok.all()
    assert buffer == value
    backend.close()


def test_what_cannot_be_cleared_is_counted_and_not_reported(tmp_path: Path):
    disk, keys = FailingDisk(), sample_chain(3)
    backend = FileBackend(tmp_path / "s", disk=disk, retry_s=1.0)
    store = PageStore(backend)
    assert store_pages(store, keys) == [True] * 3
    disk.errors["note"] = errno.EIO
    assert store.clear(SAMPLE_NAMESPACE) == Cleared(0, 0, 3)
    assert not store.contains(keys).any()
    assert store.health()
    disk.errors.clear()
    assert store.clear(SAMPLE_NAMESPACE) == Cleared(3, 3 * (PAGE_BYTES + HEADER_BYTES), 0)
    store.close()


class OrderDisk(Disk):
    """Notes each write and read of a value among what the test notes."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def write(self, handle: int, parts: Sequence[memoryview], offset: int) -> None:
        self._order.append(f"write {bytes(parts[-1][:1]).decode()}")
        super().write(handle, parts, offset)

    def read(self, handle: int, parts: Sequence[memoryview], offset: int) -> bool:
        self._order.append("read")
        return super().read(handle, parts, offset)


def test_a_page_is_filled_just_before_it_is_written_and_judged_just_after_it_was_read(tmp_path: Path):
    """So that its bytes are still in the CPU's cache. One that is not good is gone."""
    order: list[str] = []
    keys, values = sample_chain(3), [bytearray(200) for _ in range(3)]
    backend = FileBackend(tmp_path, disk=OrderDisk(order))

    def fill(i: int) -> None:
        order.append(f"fill {i}")
        values[i][:] = b"%d" % i * 200

    def is_good(i: int) -> bool:
        order.append(f"judge {i}")
        return i != 1

    buffers = [[memoryview(value)] for value in values]
    assert backend.write_each(keys, buffers, fill).all()
    assert order == ["fill 0", "write 0", "fill 1", "write 1", "fill 2", "write 2"]
    order.clear()
    result = backend.read_each(keys, buffers, is_good)
    assert order == ["read", "judge 0", "read", "judge 1", "read", "judge 2"]
    assert (result.ok.tolist(), result.damaged.tolist()) == ([True, False, True], [False, True, False])
    assert backend.contains(keys).tolist() == [True, False, True]
    backend.close()


def test_pages_of_a_second_batch_are_filled_by_their_own_numbers(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("hicache.storage.file.backend._BATCH_PAGES", 2)
    keys = sample_chain(5)
    store = PageStore(FileBackend(tmp_path))
    assert store_pages(store, keys) == load_pages(store, keys) == [True] * 5
    store.close()
