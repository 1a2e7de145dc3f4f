"""A sync: what was acknowledged before it survives a power cut."""

import errno
from pathlib import Path

import pytest

from hicache.errors import StorageError
from hicache.storage.file import FileBackend
from hicache.storage.file.disk import Disk
from hicache.testing.storage import put, sample_chain
from tests.storage.support import (
    FailingDisk,
    FakeClock,
)


class SyncNotingDisk(Disk):
    """Notes which files were synced, by the end of their names."""

    def __init__(self) -> None:
        self.paths: dict[int, str] = {}
        self.synced: list[str] = []

    def open(self, path: str) -> int:
        handle = super().open(path)
        self.paths[handle] = path.rsplit(".", 1)[1]
        return handle

    def sync(self, handle: int) -> None:
        self.synced.append(self.paths[handle])
        super().sync(handle)


def test_sync_puts_all_values_on_the_disk_before_what_tells_of_them(tmp_path: Path):
    disk = SyncNotingDisk()
    backend = FileBackend(tmp_path, disk=disk)
    for i, key in enumerate(sample_chain(3)):
        put(backend, key, bytes(5000 * i + 1))
    assert disk.synced == []
    backend.sync()
    assert disk.synced == ["slots"] * 3 + ["index"] * 3
    backend.close()


def test_a_write_syncs_when_the_last_sync_is_long_ago(tmp_path: Path):
    disk, clock = FailingDisk(), FakeClock()
    keys = sample_chain(5)
    backend = FileBackend(tmp_path, sync_s=10.0, retry_s=5.0, disk=disk, clock_s=clock)
    for key, passed_s, calls in zip(keys[:3], [9.0, 2.0, 9.0], [0, 2, 2], strict=True):
        clock.now_s += passed_s
        assert put(backend, key, b"value")
        assert disk.calls.get("sync", 0) == calls
    disk.errors["sync"] = errno.EIO
    clock.now_s += 10.0
    assert put(backend, keys[3], b"value"), "it is there, if not for good"
    assert "EIO" in backend.health()[0]
    assert not put(backend, keys[4], b"value"), "paused"
    with pytest.raises(StorageError, match="cannot sync the page store"):
        backend.sync()
    backend.close()
