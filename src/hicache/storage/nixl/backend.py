"""A value is one private file, written beside its place and renamed: whole or absent, whoever ends when."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import numpy as np

from hicache.errors import StorageError
from hicache.storage.gate import Gate
from hicache.storage.names import namespace_prefix, value_name
from hicache.storage.nixl.engine import Engine
from hicache.storage.protocol import Buffers, Cleared, ReadResult, StorageKey
from hicache.storage.remote import Outage
from hicache.units import BoolArray

_FILES_AT_ONCE = 64
_STALE_S = 3600.0
"""A file that began to be written this long ago belongs to nobody any more."""


class NixlPosixBackend:
    """A StorageBackend in a folder, local or on a file system that machines share; several processes may use one.

    Nothing is evicted, and a file system that hangs makes a call hang: what the engine may still write to cannot be
    taken away from it. Raises StorageError for a folder or a `queue` (of hicache.storage.nixl.engine.QUEUES) that can't
    be used.
    """

    def __init__(self, root: Path, queue: str) -> None:
        self._root = root.absolute()
        self._temps = self._root / "tmp"
        name = f"nixl-posix store {self._root}"
        self._gate = Gate(name)
        self._outage = Outage(name)
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._temps.mkdir(mode=0o700, exist_ok=True)
            self._reclaim()
        except OSError as error:
            raise StorageError(f"{name}: cannot use this folder: {error}") from error
        self._engine = Engine(queue)

    def register(self, arenas: Sequence[memoryview]) -> None:
        """Tells the engine of host memory whose pages will be stored and fetched. StorageError if it can't be."""
        with self._gate:
            self._engine.memory.add(arenas)

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """Which pages are there now, shape [keys]: one look-up each."""
        with self._gate:
            return np.array([self._path(key).exists() for key in keys], dtype=np.bool_)

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """Files go into the buffers; one of another length is damaged, and removed."""
        result = ReadResult.nothing(len(keys))
        with self._gate:
            self._outage.note(None)
            for start in range(0, len(keys), _FILES_AT_ONCE):
                self._read(range(start, min(start + _FILES_AT_ONCE, len(keys))), keys, values, result)
        return result

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """Writes each value beside its place and renames it; False where the file system refused."""
        stored = np.zeros(len(keys), dtype=np.bool_)
        with self._gate:
            self._outage.note(None)
            for start in range(0, len(keys), _FILES_AT_ONCE):
                self._write(range(start, min(start + _FILES_AT_ONCE, len(keys))), keys, values, stored)
        return stored

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """True: a value was there and is gone. Shape [keys]."""
        with self._gate:
            return np.array([self._remove(self._path(key)) for key in keys], dtype=np.bool_)

    def clear(self, namespace: bytes) -> Cleared:
        """Removes every file of a namespace."""
        pages = size_bytes = left = 0
        with self._gate:
            for folder, _, names in os.walk(self._root / namespace_prefix(namespace)):
                for name in names:
                    path = Path(folder, name)
                    with suppress(FileNotFoundError):
                        nbytes = path.stat().st_size
                        gone = self._remove(path)
                        pages, size_bytes = pages + gone, size_bytes + nbytes * gone
                        left += not gone
        return Cleared(pages, size_bytes, left)

    def health(self) -> tuple[str, ...]:
        """Says what the file system refused in the last call, if it did."""
        return self._outage.health()

    def close(self) -> None:
        """Waits for calls under way and takes memory back from the engine."""
        if self._gate.close():
            self._engine.close()

    def _read(self, asked: range, keys: Sequence[StorageKey], values: Sequence[Buffers], result: ReadResult) -> None:
        with _open_files() as files:
            found = {}
            for i in asked:
                size_bytes = sum(part.nbytes for part in values[i])
                try:
                    file = files.open(self._path(keys[i]), os.O_RDONLY)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._note(error)
                    result.failed[i] = True
                    continue
                if os.fstat(file).st_size == size_bytes:
                    found[i] = file
                else:
                    result.damaged[i] = True
                    self._remove(self._path(keys[i]))
            with self._engine.memory.lend([values[i] for i in found]) as lent:
                good = self._engine.read(list(found.values()), lent)
                for i, one in zip(found, lent, strict=True):
                    # One bad file fails the transfer of all: then each is tried alone.
                    result.ok[i] = good or self._engine.read([found[i]], [one])
                    result.failed[i] = not result.ok[i]
                    if result.ok[i]:
                        one.hand_out()
            if result.failed[list(asked)].any():
                self._outage.note("reading failed")

    def _write(self, given: range, keys: Sequence[StorageKey], values: Sequence[Buffers], stored: BoolArray) -> None:
        with _open_files() as files, self._engine.memory.lend([values[i] for i in given]) as lent:
            opened, taken = {}, {}
            for i, one in zip(given, lent, strict=True):
                temp = self._temps / uuid4().hex
                try:
                    file = files.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                    opened[i] = temp
                    # Here a full disk says so; the engine only says that something failed.
                    os.posix_fallocate(file, 0, max(one.nbytes, 1))
                    os.ftruncate(file, one.nbytes)
                except OSError as error:
                    self._note(error)
                    continue
                one.take_in()
                taken[i] = file, one
            good = self._engine.write([file for file, _ in taken.values()], [one for _, one in taken.values()])
            for i, (file, one) in taken.items():
                if good or self._engine.write([file], [one]):
                    stored[i] = self._rename(opened.pop(i), self._path(keys[i]))
                else:
                    self._outage.note("writing failed")
            for temp in opened.values():
                self._remove(temp)

    def _rename(self, temp: Path, path: Path) -> bool:
        try:
            with suppress(FileNotFoundError):
                temp.rename(path)
                return True
            for folder in reversed(path.relative_to(self._root).parents):
                (self._root / folder).mkdir(mode=0o700, exist_ok=True)
            temp.rename(path)
        except OSError as error:
            self._note(error)
            self._remove(temp)
            return False
        return True

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._note(error)
            return False
        return True

    def _path(self, key: StorageKey) -> Path:
        folder, _, page = value_name(key).rpartition("/")
        return self._root / folder / page[:2] / page

    def _reclaim(self) -> None:
        oldest_s = time.time() - _STALE_S
        for temp in self._temps.iterdir():
            with suppress(FileNotFoundError):
                if temp.stat().st_mtime < oldest_s:
                    temp.unlink()

    def _note(self, error: OSError) -> None:
        self._outage.note(error.strerror or str(error))


class _Files:
    """Open files."""

    def __init__(self) -> None:
        self.handles: list[int] = []

    def open(self, path: Path, flags: int) -> int:
        handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self.handles.append(handle)
        return handle


@contextmanager
def _open_files() -> Iterator[_Files]:
    """Files that are closed at the end."""
    files = _Files()
    try:
        yield files
    finally:
        for handle in files.handles:
            os.close(handle)
