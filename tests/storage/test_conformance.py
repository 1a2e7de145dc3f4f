"""Every backend, bare and behind each wrapper, holds to the protocol."""

from pathlib import Path

from hicache.storage import StorageBackend
from hicache.storage.file import FileBackend
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import FaultyBackend, HeldBackend, MeteredBackend, SlowBackend, seeded_faults
from hicache.testing.storage import StorageBackendConformance
from tests.storage.promises import PROMISES


class TestMemory(StorageBackendConformance):
    persistent = PROMISES["memory"].outlives_close
    shared = PROMISES["memory"].shared
    straight = PROMISES["memory"].straight
    lists = PROMISES["memory"].lists

    def make_backend(self, folder: Path) -> StorageBackend:
        return MemoryBackend()


class TestFile(StorageBackendConformance):
    persistent = PROMISES["file"].outlives_close
    shared = PROMISES["file"].shared
    straight = PROMISES["file"].straight
    lists = PROMISES["file"].lists

    def make_backend(self, folder: Path) -> StorageBackend:
        return FileBackend(folder / "store")


class TestFileWithCap(StorageBackendConformance):
    lists = True

    def make_backend(self, folder: Path) -> StorageBackend:
        return FileBackend(folder / "store", cap_bytes=4 << 20)


class TestWrapped(StorageBackendConformance):
    persistent = False

    def make_backend(self, folder: Path) -> StorageBackend:
        slow = SlowBackend(HeldBackend(MemoryBackend()), lambda operation, pages: 0.0)
        return MeteredBackend(FaultyBackend(slow, seeded_faults(0, {})))
