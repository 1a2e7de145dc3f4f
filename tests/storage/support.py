"""Small tools for tests of stores: pages whose bytes name their key, folders measured, disks that fail."""

import os
from collections.abc import Sequence
from pathlib import Path

from hicache.storage import PageStore, StorageKey
from hicache.storage.chains import entry_id
from hicache.storage.file.disk import Disk
from hicache.storage.file.folder import Folder
from hicache.testing.storage import sample_value

PAGE_BYTES = 3000

REPOSITORY = Path(__file__).parents[2]
"""Where a new process finds these tools."""


def page(key: StorageKey, size_bytes: int = PAGE_BYTES) -> memoryview:
    return memoryview(bytearray(sample_value(key, size_bytes)))


def store_pages(store: PageStore, keys: Sequence[StorageKey], size_bytes: int = PAGE_BYTES) -> list[bool]:
    return [bool(yes) for yes in store.write(keys, [page(key, size_bytes) for key in keys])]


def load_pages(store: PageStore, keys: Sequence[StorageKey], size_bytes: int = PAGE_BYTES) -> list[bool]:
    """Which pages came back ok; fails the test if one of them has wrong bytes."""
    buffers = [memoryview(bytearray(size_bytes)) for _ in keys]
    result = store.read(keys, buffers)
    for key, buffer, ok in zip(keys, buffers, result.ok, strict=True):
        assert not ok or buffer == page(key, size_bytes), "a page with wrong bytes was called ok"
    return [bool(yes) for yes in result.ok]


def page_file(root: Path, key: StorageKey) -> Path:
    return Path(Folder(str(root)).page_path(entry_id(key)))


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def value_bytes(root: Path) -> int:
    """Bytes of all values, whole or being written."""
    return sum(path.stat().st_size for part in ("pages", "tmp") for path in files_below(root / part))


class FailingDisk(Disk):
    """Raises `errors[method]`, an errno, as long as it is set; counts every call."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def _enter(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if name in self.errors:
            raise OSError(self.errors[name], os.strerror(self.errors[name]))

    def create(self, path: str) -> int:
        self._enter("create")
        return super().create(path)

    def write(self, handle: int, parts: Sequence[memoryview]) -> None:
        if "write" in self.errors:
            super().write(handle, [parts[0], parts[-1][: parts[-1].nbytes // 2]])
        self._enter("write")
        super().write(handle, parts)

    def read(self, path: str, parts: Sequence[memoryview]) -> int:
        self._enter("read")
        return super().read(path, parts)

    def replace(self, source: str, target: str) -> None:
        self._enter("replace")
        super().replace(source, target)

    def remove(self, path: str) -> None:
        self._enter("remove")
        super().remove(path)

    def status(self, path: str) -> os.stat_result:
        self._enter("status")
        return super().status(path)


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
