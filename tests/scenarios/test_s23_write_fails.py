"""S23: write k of n fails; the hit is the good prefix, nothing bad is visible, what is missing is tried again."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache.storage import PageStore
from hicache.storage.file import FileBackend
from hicache.storage.file.disk import Disk
from hicache.testing.storage import sample_chain
from tests.storage.support import PAGE_BYTES, SLOT_BYTES, FakeClock, load_pages, store_pages, value_bytes

FAILS_AT = 4


class FailsOnce(Disk):
    """The k-th write leaves a slot with so many bytes, and an error."""

    def __init__(self, left_bytes: int, code: int) -> None:
        self._writes = 0
        self._left_bytes = left_bytes
        self._code = code

    def write(self, handle: int, parts: Sequence[memoryview], offset: int) -> None:
        self._writes += 1
        if self._writes == FAILS_AT + 1:
            super().write(handle, [memoryview(b"".join(parts))[: self._left_bytes]], offset)
            raise OSError(self._code, os.strerror(self._code))
        super().write(handle, parts, offset)


@pytest.mark.parametrize("left_bytes", [0, 100, 256, 2000])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_the_hit_is_the_good_prefix_and_the_rest_is_tried_again(tmp_path: Path, left_bytes: int, code: int):
    clock = FakeClock()
    keys = sample_chain(8)
    backend = FileBackend(tmp_path, retry_s=5.0, disk=FailsOnce(left_bytes, code), clock_s=clock)
    store = PageStore(backend)
    assert store_pages(store, keys) == [True] * FAILS_AT + [False] * 4
    assert store.contains(keys).tolist() == [True] * FAILS_AT + [False] * 4
    assert load_pages(store, keys) == [True] * FAILS_AT + [False] * 4
    assert value_bytes(tmp_path) == FAILS_AT * SLOT_BYTES
    stats = store.stats()
    assert (stats.written_pages, stats.written_bytes) == (FAILS_AT, FAILS_AT * PAGE_BYTES)
    assert (stats.read_bytes, stats.write_failed_pages) == (FAILS_AT * PAGE_BYTES, 4)
    clock.now_s += 6.0
    assert store_pages(store, keys) == [True] * 8
    assert load_pages(store, keys) == [True] * 8
    assert store.stats().written_bytes == 8 * PAGE_BYTES
    assert store.health() == ()
    store.close()
