"""Several processes on one store: each sees what the others do, the cap holds for all, and any may be killed."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.storage import PageStore
from hicache.storage.file import FileBackend
from hicache.storage.file.disk import Disk
from hicache.storage.file.journal import Journal, Place
from hicache.storage.file.records import State
from hicache.testing.storage import get, put, sample_chain
from tests.storage.support import (
    REPOSITORY,
    SLOT_BYTES,
    disk_bytes,
    load_pages,
    records,
    set_used,
    store_pages,
    value_bytes,
    writers,
)


def two(root: Path, cap_bytes: int | None = None) -> tuple[FileBackend, FileBackend]:
    return FileBackend(root, cap_bytes), FileBackend(root, cap_bytes)


def test_what_one_writes_the_other_finds(tmp_path: Path):
    one, other = two(tmp_path)
    keys = sample_chain(3)
    store_pages(PageStore(one), keys)
    assert other.contains(keys).all()
    assert load_pages(PageStore(other), keys) == [True] * 3
    assert other.used_bytes == one.used_bytes == value_bytes(tmp_path)
    one.delete(keys[1:])
    assert other.contains(keys).tolist() == [True, False, False]
    assert load_pages(PageStore(other), keys) == [True, False, False]
    one.close()
    other.close()


def test_the_cap_and_the_order_hold_for_both_together(tmp_path: Path):
    one, other = two(tmp_path, 8 * SLOT_BYTES)
    keys = sample_chain(8)
    for i in range(0, 8, 2):
        assert store_pages(PageStore(one), keys[i : i + 1]) == [True]
        assert store_pages(PageStore(other), keys[i + 1 : i + 2]) == [True]
    assert store_pages(PageStore(one), sample_chain(3, chain="b")) == [True] * 3
    assert one.contains(keys).tolist() == [True] * 5 + [False] * 3, "tails first, whoever wrote them"
    assert value_bytes(tmp_path) <= 8 * SLOT_BYTES
    assert store_pages(PageStore(other), sample_chain(9, chain="c")) == [True] * 8 + [False]
    assert other.used_bytes == value_bytes(tmp_path) == 8 * SLOT_BYTES
    one.close()
    other.close()


def test_what_the_other_used_lately_is_not_the_oldest(tmp_path: Path):
    first, second = sample_chain(1, chain="first"), sample_chain(1, chain="second")
    seed = FileBackend(tmp_path)
    store_pages(PageStore(seed), [*first, *second])
    seed.close()
    for i, key in enumerate([*first, *second]):
        set_used(tmp_path, key, 1000 + i)
    one, other = two(tmp_path, 2 * SLOT_BYTES)
    assert load_pages(PageStore(other), first) == [True]
    store_pages(PageStore(one), sample_chain(1, chain="new"))
    assert one.contains([*first, *second]).tolist() == [True, False]
    one.close()
    other.close()


class MeetingDisk(Disk):
    """Two writers meet before each stores its value."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def write(self, handle: int, parts: Sequence[memoryview], offset: int) -> None:
        super().write(handle, parts, offset)
        self._barrier.wait(10)


def test_two_writers_of_one_key_meet_before_they_store(tmp_path: Path):
    barrier = threading.Barrier(2)
    backends = [FileBackend(tmp_path, disk=MeetingDisk(barrier)) for _ in range(2)]
    [key] = sample_chain(1)
    values = [letter * 10_000 for letter in (b"a", b"b")]
    done: list[bool] = []
    threads = [threading.Thread(target=lambda i=i: done.append(put(backends[i], key, values[i]))) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True, True]
    assert get(backends[0], key, 10_000) in values
    assert value_bytes(tmp_path) == 3 * 4096, "the value that was stored first has given its slot back"
    assert backends[0].contains([key])[0]
    assert backends[1].contains([key])[0]
    assert [backend.used_bytes for backend in backends] == [3 * 4096] * 2
    for backend in backends:
        backend.close()


class LookingDisk(Disk):
    """In the middle of a write, lets another store try to write a value that would only fit without this one."""

    def __init__(self, other: FileBackend) -> None:
        self._other = other
        self.other_wrote: list[bool] = []

    def write(self, handle: int, parts: Sequence[memoryview], offset: int) -> None:
        super().write(handle, parts, offset)
        self.other_wrote.append(put(self._other, sample_chain(1, chain="other")[0], bytes(6000)))


def test_what_is_being_written_counts_for_all(tmp_path: Path):
    other = FileBackend(tmp_path, 12_000)
    disk = LookingDisk(other)
    one = FileBackend(tmp_path, 12_000, disk=disk)
    assert put(one, sample_chain(1)[0], bytes(6000))
    assert disk.other_wrote == [False]
    assert other.contains(sample_chain(1)).all()
    assert other.used_bytes == disk_bytes(tmp_path) == 8192
    one.close()
    other.close()


LEAVES = """
import os, signal, sys
from dataclasses import replace
from hicache.storage.file import FileBackend
from hicache.storage.file.disk import Disk
from hicache.testing.storage import put, sample_chain

class Dies(Disk):
    def write(self, handle, parts, offset):
        if parts[-1].nbytes == 256 and sum(part.nbytes for part in parts) == 9000:
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(handle, parts, offset)

backend = FileBackend(sys.argv[1], disk=Dies())
[own] = sample_chain(1, chain="own")
put(backend, sample_chain(1)[0], bytes(3000))
put(backend, replace(own, private=True), bytes(5000))
put(backend, sample_chain(2)[1], bytes(9000))
"""


def test_what_a_dead_writer_left_is_reclaimed_and_what_a_living_one_has_is_not(tmp_path: Path):
    """Slots that it was writing to, and values that nobody else would ever read."""
    living = FileBackend(tmp_path)
    [mine] = sample_chain(1, chain="mine")
    put(living, replace(mine, private=True), bytes(5000))
    dead = subprocess.run([sys.executable, "-c", LEAVES, str(tmp_path)], cwd=REPOSITORY, check=False, timeout=60)
    assert dead.returncode == -signal.SIGKILL
    assert value_bytes(tmp_path) == (1 + 2 + 2 + 3) * 4096
    other = FileBackend(tmp_path)
    assert value_bytes(tmp_path) == other.used_bytes == (1 + 2) * 4096
    assert len(writers(tmp_path)) == 2, "the mark of the dead one is gone"
    assert get(other, sample_chain(1)[0], 3000) == bytes(3000)
    assert other.contains([mine, *sample_chain(1, chain="own")]).tolist() == [True, False]
    assert living.used_bytes == (1 + 2) * 4096 or living.contains([mine])[0]
    other.close()
    living.close()
    third = FileBackend(tmp_path)
    assert not third.contains([mine])[0], "a private value ends with its writer"
    third.close()


def test_a_full_store_takes_back_what_a_dead_writer_reserved(tmp_path: Path):
    """Without anybody opening the store anew."""
    living = FileBackend(tmp_path, 5 * 4096)
    subprocess.run([sys.executable, "-c", LEAVES_FEW, str(tmp_path)], cwd=REPOSITORY, check=False, timeout=60)
    assert value_bytes(tmp_path) == 3 * 4096
    assert put(living, sample_chain(1)[0], bytes(20_000))
    assert living.used_bytes == disk_bytes(tmp_path) == 5 * 4096
    living.close()


LEAVES_FEW = """
import os, signal, sys
from hicache.storage.file import FileBackend
from hicache.storage.file.disk import Disk
from hicache.testing.storage import put, sample_chain

class Dies(Disk):
    def write(self, handle, parts, offset):
        os.kill(os.getpid(), signal.SIGKILL)

put(FileBackend(sys.argv[1], 5 * 4096, disk=Dies()), sample_chain(1)[0], bytes(9000))
"""


class MeddlingDisk(Disk):
    """Before or after the first read of a value, another store does something."""

    def __init__(self) -> None:
        self.before: list[Callable[[], object]] = []
        self.after: list[Callable[[], object]] = []

    def read(self, handle: int, parts: Sequence[memoryview], offset: int) -> bool:
        while self.before:
            self.before.pop()()
        whole = super().read(handle, parts, offset)
        while self.after:
            self.after.pop()()
        return whole


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("other_size", [3000, 9000])
def test_a_slot_that_another_process_takes_while_it_is_read_is_a_miss(tmp_path: Path, when: str, other_size: int):
    """Never the other's bytes, nor zeros: bare values, without the checksum that pages have."""
    disk = MeddlingDisk()
    one, other = FileBackend(tmp_path, 3 * 4096, disk=disk), FileBackend(tmp_path, 3 * 4096)
    [key], [later] = sample_chain(1), sample_chain(1, chain="later")
    assert put(one, key, b"a" * 3000)
    assert put(other, sample_chain(1, chain="c")[0], b"c" * 3000)
    assert put(other, sample_chain(1, chain="d")[0], b"d" * 3000)
    (disk.before if when == "before" else disk.after).append(lambda: put(other, later, b"l" * other_size))
    assert get(one, key, 3000) is None
    assert get(one, later, other_size) == b"l" * other_size
    assert not one.contains([key])[0]
    one.close()
    other.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_value_that_is_replaced_while_it_is_read_is_the_new_one(tmp_path: Path, when: str):
    disk = MeddlingDisk()
    one, other = FileBackend(tmp_path, disk=disk), FileBackend(tmp_path)
    [key] = sample_chain(1)
    assert put(one, key, b"a" * 3000)
    (disk.before if when == "before" else disk.after).append(lambda: put(other, key, b"b" * 3000))
    assert get(one, key, 3000) == b"b" * 3000
    assert value_bytes(tmp_path) == 4096
    one.close()
    other.close()


def test_a_store_that_lost_news_reads_all_records(tmp_path: Path):
    one, other = two(tmp_path)
    keys = sample_chain(2)
    store_pages(PageStore(one), keys[:1])
    os.truncate(tmp_path / "journal", 0)
    store_pages(PageStore(one), keys[1:])
    assert other.contains(keys).all()
    assert one.contains(keys).all()
    one.close()
    other.close()


@pytest.mark.parametrize(
    "tail", [b"\x01", b"x" * 30, b"\xff" * 49, b"\xff" * 32, bytes(16), (4096).to_bytes(8, "little") + b"\xff" * 8]
)
def test_torn_or_foreign_news_does_no_harm(tmp_path: Path, tail: bytes):
    one, other = two(tmp_path)
    keys = sample_chain(3)
    store_pages(PageStore(one), keys[:1])
    with (tmp_path / "journal").open("ab") as journal:
        journal.write(tail)
    assert other.contains(keys).tolist() == [True, False, False]
    store_pages(PageStore(other), keys[1:2])
    store_pages(PageStore(one), keys[2:])
    assert other.contains(keys).all()
    assert one.contains(keys).all()
    assert one.used_bytes == other.used_bytes == value_bytes(tmp_path)
    one.close()
    other.close()


def test_a_store_that_another_process_keeps_is_an_error_that_passes(tmp_path: Path):
    backend = FileBackend(tmp_path, retry_s=0.0, patience_s=0.05)
    keys = sample_chain(2)
    holder = Journal(str(tmp_path / "journal"), 1.0)
    with holder.turn():
        assert not put(backend, keys[0], b"value")
        assert "another process has held the store" in backend.health()[0]
        assert not backend.contains(keys).any()
    assert put(backend, keys[0], b"value")
    assert backend.health() == ()
    holder.close()
    backend.close()


def test_the_journal_starts_again_when_it_is_long(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("hicache.storage.file.journal._LONGEST_BYTES", 10_000)
    path = str(tmp_path / "journal")
    one, other = Journal(path, 1.0), Journal(path, 1.0)
    for journal in (one, other):
        with journal.turn():
            journal.catch_up()
    changes = [Place(4096, 7), Place(8192, 0)]
    with one.turn():
        one.append(changes)
    assert other.has_news()
    with other.turn():
        assert other.news() == changes
    longest_bytes = 0
    with one.turn():
        for _ in range(500):
            one.append(changes)
            longest_bytes = max(longest_bytes, os.path.getsize(path))
    assert os.path.getsize(path) < longest_bytes < 10_100
    with other.turn():
        assert other.news() is None
        other.catch_up()
        assert other.news() == []
    one.close()
    other.close()


WRITER = """
import itertools, sys
from hicache.storage import PageStore
from hicache.storage.file import FileBackend
from hicache.testing.storage import sample_chain
from tests.storage.support import store_pages
store = PageStore(FileBackend(sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
for i in itertools.count(int(sys.argv[3])):
    store_pages(store, sample_chain(6, chain=str(i % 40)), 60_000)
    print("wrote", flush=True)
"""


def start_writer(root: Path, cap_bytes: int, first: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, str(root), str(cap_bytes), str(first)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"ready\n"
    return writer


def wait_for_chains(writer: subprocess.Popen[bytes], count: int) -> None:
    assert writer.stdout is not None
    for _ in range(count):
        assert writer.stdout.readline() == b"wrote\n"


def kill(writer: subprocess.Popen[bytes]) -> None:
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert writer.stdout is not None
    writer.stdout.close()


def check_after_kill(root: Path, cap_bytes: int) -> int:
    """Every page is whole and right or absent, and the store works; returns how many pages are there."""
    backend = FileBackend(root, cap_bytes)
    store = PageStore(backend)
    assert len(writers(root)) == 1, "the marks of the dead are gone"
    assert backend.used_bytes == value_bytes(root) <= cap_bytes
    assert backend.disk_bytes <= cap_bytes
    assert disk_bytes(root) <= cap_bytes + 4096, "the file system may need a block to keep track"
    assert not any(record.state is State.RESERVED for record, _ in records(root).values())
    found = 0
    for i in range(40):
        keys = sample_chain(6, chain=str(i))
        there = store.contains(keys).tolist()
        assert load_pages(store, keys, 60_000) == there
        assert there == sorted(there, reverse=True), "no tail without its head"
        found += sum(there)
    stats = store.stats()
    assert (stats.damaged_pages, stats.read_failed_pages) == (0, 0)
    assert store_pages(store, sample_chain(2, chain="after"), 60_000) == [True, True]
    store.delete(sample_chain(2, chain="after"))
    store.close()
    return found


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_a_killed_writer_leaves_whole_pages_or_none(tmp_path: Path, seed: int):
    source, cap_bytes, found = random.Random(seed), 60 * 61_440, 0
    for i in range(4):
        writer = start_writer(tmp_path, cap_bytes, 7 * i)
        wait_for_chains(writer, source.randrange(6))
        time.sleep(source.uniform(0.0, 0.02))
        kill(writer)
        found += check_after_kill(tmp_path, cap_bytes)
    assert found > 6


def test_two_processes_write_and_one_is_killed(tmp_path: Path):
    cap_bytes = 60 * 61_440
    first, second = start_writer(tmp_path, cap_bytes, 0), start_writer(tmp_path, cap_bytes, 20)
    most_bytes = 0
    for _ in range(25):
        wait_for_chains(first, 1)
        wait_for_chains(second, 1)
        most_bytes = max(most_bytes, disk_bytes(tmp_path))
    kill(first)
    third = FileBackend(tmp_path, cap_bytes)
    for _ in range(10):
        wait_for_chains(second, 1)
        most_bytes = max(most_bytes, disk_bytes(tmp_path))
    third.close()
    kill(second)
    assert 0 < most_bytes <= cap_bytes + 4096
    assert check_after_kill(tmp_path, cap_bytes) > 40
