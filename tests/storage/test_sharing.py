"""Several processes on one store: each sees what the others do, the cap holds for all, and any may be killed."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hicache.storage import PageStore
from hicache.storage.chains import entry_id
from hicache.storage.file import FileBackend
from hicache.storage.file.disk import Disk
from hicache.storage.file.folder import Folder
from hicache.storage.file.journal import Change, Journal, Record
from hicache.testing.storage import get, put, sample_chain
from tests.storage.support import PAGE_BYTES, REPOSITORY, files_below, load_pages, page_file, store_pages, value_bytes

VALUE_BYTES = PAGE_BYTES + 256


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
    one, other = two(tmp_path, 8 * VALUE_BYTES)
    keys = sample_chain(8)
    for i in range(0, 8, 2):
        assert store_pages(PageStore(one), keys[i : i + 1]) == [True]
        assert store_pages(PageStore(other), keys[i + 1 : i + 2]) == [True]
    assert store_pages(PageStore(one), sample_chain(3, chain="b")) == [True] * 3
    assert one.contains(keys).tolist() == [True] * 5 + [False] * 3, "tails first, whoever wrote them"
    assert value_bytes(tmp_path) <= 8 * VALUE_BYTES
    assert store_pages(PageStore(other), sample_chain(9, chain="c")) == [True] * 8 + [False]
    assert other.used_bytes == value_bytes(tmp_path) == 8 * VALUE_BYTES
    one.close()
    other.close()


def test_what_the_other_used_lately_is_not_the_oldest(tmp_path: Path):
    first, second = sample_chain(1, chain="first"), sample_chain(1, chain="second")
    seed = FileBackend(tmp_path)
    store_pages(PageStore(seed), [*first, *second])
    seed.close()
    for i, key in enumerate([*first, *second]):
        os.utime(page_file(tmp_path, key), (1000 + i, 1000 + i))
    one, other = two(tmp_path, 2 * VALUE_BYTES)
    assert load_pages(PageStore(other), first) == [True]
    store_pages(PageStore(one), sample_chain(1, chain="new"))
    assert one.contains([*first, *second]).tolist() == [True, False]
    one.close()
    other.close()


class MeetingDisk(Disk):
    """Two writers meet before each renames its file."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def write(self, handle: int, parts) -> None:
        super().write(handle, parts)
        self._barrier.wait(10)


def test_two_writers_of_one_key_meet_before_the_rename(tmp_path: Path):
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
    assert value_bytes(tmp_path) == 10_000
    assert backends[0].contains([key])[0]
    assert [backend.used_bytes for backend in backends] == [10_000] * 2 or backends[1].contains([key])[0]
    for backend in backends:
        backend.close()


class LookingDisk(Disk):
    """In the middle of a write, lets another store try to write a value that would only fit without this one."""

    def __init__(self, other: FileBackend) -> None:
        self._other = other
        self.other_wrote: list[bool] = []

    def write(self, handle: int, parts) -> None:
        super().write(handle, parts)
        self.other_wrote.append(put(self._other, sample_chain(1, chain="other")[0], bytes(600)))


def test_what_is_being_written_counts_for_all(tmp_path: Path):
    other = FileBackend(tmp_path, 1000)
    disk = LookingDisk(other)
    one = FileBackend(tmp_path, 1000, disk=disk)
    assert put(one, sample_chain(1)[0], bytes(600))
    assert disk.other_wrote == [False]
    assert other.contains(sample_chain(1)).all()
    assert other.used_bytes == 600
    one.close()
    other.close()


def test_what_a_dead_writer_left_is_reclaimed_and_what_a_living_one_writes_is_not(tmp_path: Path):
    living = FileBackend(tmp_path)
    [key] = sample_chain(1)
    entry = entry_id(key)
    folder = Folder(str(tmp_path))
    [mark] = files_below(tmp_path / "tmp")
    ours = Path(folder.temp_path(mark.name.removesuffix(".writer"), 7, entry, 100))
    dead = Path(folder.temp_path("d" * 16, 7, entry, 100))
    orphan = Path(folder.temp_path("e" * 16, 1, entry, 100))
    dead_mark = tmp_path / "tmp" / f"{'d' * 16}.writer"
    for path in (ours, dead, orphan, dead_mark):
        path.write_bytes(b"x" * 50)
    other = FileBackend(tmp_path)
    assert ours.exists()
    assert not any(path.exists() for path in (dead, orphan, dead_mark))
    assert other.used_bytes == 100, "what is being written counts in full"
    other.close()
    living.close()


def test_a_store_that_lost_news_lists_the_folders(tmp_path: Path):
    one, other = two(tmp_path)
    keys = sample_chain(2)
    store_pages(PageStore(one), keys[:1])
    os.truncate(tmp_path / "journal", 0)
    store_pages(PageStore(one), keys[1:])
    assert other.contains(keys).all()
    assert one.contains(keys).all()
    one.close()
    other.close()


@pytest.mark.parametrize("tail", [b"\x01", b"\x03" + b"x" * 30, b"\xff" * 49])
def test_a_torn_or_foreign_record_does_no_harm(tmp_path: Path, tail: bytes):
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
    record = Record(Change.STORED, b"e" * 40, 1)
    with one.turn():
        one.append(record)
    assert other.has_news()
    with other.turn():
        assert other.news() == [record]
    longest_bytes = 0
    with one.turn():
        for _ in range(300):
            one.append(record)
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
    assert len(files_below(root / "tmp")) == 1, "temporary files of the dead are gone"
    assert backend.used_bytes == value_bytes(root) <= cap_bytes
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
    source, cap_bytes, found = random.Random(seed), 60 * 60_256, 0
    for i in range(4):
        writer = start_writer(tmp_path, cap_bytes, 7 * i)
        wait_for_chains(writer, source.randrange(6))
        time.sleep(source.uniform(0.0, 0.02))
        kill(writer)
        found += check_after_kill(tmp_path, cap_bytes)
    assert found > 6


def test_two_processes_write_and_one_is_killed(tmp_path: Path):
    cap_bytes = 60 * 60_256
    first, second = start_writer(tmp_path, cap_bytes, 0), start_writer(tmp_path, cap_bytes, 20)
    most_bytes = 0
    for _ in range(25):
        wait_for_chains(first, 1)
        wait_for_chains(second, 1)
        most_bytes = max(most_bytes, value_bytes_while_it_changes(tmp_path))
    kill(first)
    third = FileBackend(tmp_path, cap_bytes)
    for _ in range(10):
        wait_for_chains(second, 1)
        most_bytes = max(most_bytes, value_bytes_while_it_changes(tmp_path))
    third.close()
    kill(second)
    assert 0 < most_bytes <= cap_bytes + 60_256
    assert check_after_kill(tmp_path, cap_bytes) > 40


def value_bytes_while_it_changes(root: Path) -> int:
    """Bytes of all values; one that moves or goes while this looks counts at most once."""
    sizes: dict[str, int] = {}
    for part in ("tmp", "pages"):
        for path in files_below(root / part):
            with suppress(FileNotFoundError):
                entry = (
                    path.name.split("-", 2)[2].rsplit("-", 1)[0] if part == "tmp" and "-" in path.name else path.name
                )
                sizes[entry.replace("-", "")] = path.stat().st_size
    return sum(sizes.values())
