"""S24: two writers of one key meet before they store it; one is killed in the middle of a page, then it is opened."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hicache.storage import PageStore
from hicache.storage.file import FileBackend
from hicache.storage.file.disk import Disk
from hicache.testing.storage import get, put, sample_chain
from tests.storage.support import REPOSITORY, SLOT_BYTES, load_pages, store_pages, value_bytes, writers


class InTurn(Disk):
    """A value is stored only when the other writer has written too; notes where they wrote."""

    def __init__(self, barrier: threading.Barrier, offsets: list[int]) -> None:
        self._barrier = barrier
        self._offsets = offsets

    def write(self, handle: int, parts: Sequence[memoryview], offset: int) -> None:
        self._offsets.append(offset)
        super().write(handle, parts, offset)
        self._barrier.wait(30)


def test_two_writers_of_one_key(tmp_path: Path):
    [key] = sample_chain(1)
    barrier, offsets = threading.Barrier(2), list[int]()
    first, second = (FileBackend(tmp_path, disk=InTurn(barrier, offsets)) for _ in range(2))
    threads = [
        threading.Thread(target=put, args=(backend, key, letter * 50_000))
        for backend, letter in ((first, b"a"), (second, b"b"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(offsets)) == 2
    assert get(first, key, 50_000) in (b"a" * 50_000, b"b" * 50_000)
    assert value_bytes(tmp_path) == 13 * 4096
    first.close()
    second.close()


STOPS_IN_A_PAGE = """
import os, sys, time
from hicache.storage import PageStore
from hicache.storage.file import FileBackend
from hicache.storage.file.disk import Disk
from hicache.testing.storage import sample_chain
from tests.storage.support import store_pages

class Stops(Disk):
    def write(self, handle, parts, offset):
        super().write(handle, [parts[0][:1000]], offset)
        print("half", flush=True)
        time.sleep(600)

store_pages(PageStore(FileBackend(sys.argv[1], int(sys.argv[2]))), sample_chain(2))
store_pages(PageStore(FileBackend(sys.argv[1], int(sys.argv[2]), disk=Stops())), sample_chain(3))
"""


def test_a_writer_killed_in_the_middle_of_a_page(tmp_path: Path):
    cap_bytes = 3 * SLOT_BYTES
    command = [sys.executable, "-c", STOPS_IN_A_PAGE, str(tmp_path), str(cap_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert value_bytes(tmp_path) == 3 * SLOT_BYTES
    keys = sample_chain(3)
    store = PageStore(FileBackend(tmp_path, cap_bytes))
    assert value_bytes(tmp_path) == 2 * SLOT_BYTES, "its reservation is gone"
    assert len(writers(tmp_path)) == 1
    assert load_pages(store, keys) == [True, True, False]
    assert store_pages(store, keys) == [True] * 3
    assert load_pages(store, keys) == [True] * 3
    store.close()
