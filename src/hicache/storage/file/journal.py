"""Processes that share a store take turns, and each learns which slots the others changed since its last turn.

The journal only speaks between processes that are alive: what a store holds is what its records say.
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from hicache.storage.file.disk import FILE_MODE

_MAGIC = b"hicjnl03"
_HEADER = struct.Struct("<8s8s")
_CHANGE = struct.Struct("<QQ")
_LONGEST_BYTES = 4 << 20
_TURN_S = 0.001


class Place(NamedTuple):
    """One slot of a store: the size of its slots in bytes says in which file, and its number where."""

    slot_bytes: int
    slot: int


class Journal:
    """A lock and a list of changed slots in one file. Not thread-safe: one thread per object at a time."""

    def __init__(self, path: str, patience_s: float) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        os.fchmod(self._handle, FILE_MODE)
        self._patience_s = patience_s
        self._generation = b""
        self._offset = 0
        self._gap = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the store for this process. TimeoutError if another one keeps it too long (it may be stopped)."""
        deadline = time.monotonic() + self._patience_s
        while not self._try_lock():
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has held the store for {self._patience_s:g} s")
            time.sleep(_TURN_S)
        try:
            if os.fstat(self._handle).st_nlink == 0:
                raise FileNotFoundError("somebody removed the store's files; open it again")
            yield
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def has_news(self) -> bool:
        """Whether another process changed something; cheap, and needs no turn."""
        return os.fstat(self._handle).st_size != self._offset

    def news(self) -> list[Place] | None:
        """Which slots others changed since the last turn; None: that is not known, read all records. In a turn only."""
        if self._gap or os.pread(self._handle, _HEADER.size, 0) != _HEADER.pack(_MAGIC, self._generation):
            return None
        unread_bytes = os.fstat(self._handle).st_size - self._offset
        if unread_bytes < 0 or unread_bytes % _CHANGE.size:
            return None
        data = os.pread(self._handle, unread_bytes, self._offset)
        self._offset += len(data)
        return list(dict.fromkeys(Place(*change) for change in _CHANGE.iter_unpack(data)))

    def restart(self) -> None:
        """Makes every process read all records again. In a turn only."""
        self._gap = True
        self._generation = os.urandom(8)
        os.ftruncate(self._handle, 0)
        self._write(_HEADER.pack(_MAGIC, self._generation), 0)
        self._offset = _HEADER.size
        self._gap = False

    def catch_up(self) -> None:
        """When all records are being read: later news start here. In a turn only."""
        size = os.fstat(self._handle).st_size
        whole = size >= _HEADER.size and (size - _HEADER.size) % _CHANGE.size == 0
        if self._gap or size > _LONGEST_BYTES or not whole or not self._read_generation():
            self.restart()
            return
        self._offset = size

    def append(self, changes: Sequence[Place]) -> None:
        """Tells the others. If that fails, they read all records as soon as it works again. In a turn only."""
        if self._gap or self._offset > _LONGEST_BYTES:
            self.restart()
        data = b"".join(_CHANGE.pack(*change) for change in changes)
        self._gap = True
        self._write(data, self._offset)
        self._gap = False
        self._offset += len(data)

    def close(self) -> None:
        """Gives the file back; what it says stays for the others."""
        os.close(self._handle)

    def _read_generation(self) -> bool:
        header = os.pread(self._handle, _HEADER.size, 0)
        if len(header) != _HEADER.size or header[:8] != _MAGIC:
            return False
        self._generation = header[8:]
        return True

    def _write(self, data: bytes, offset: int) -> None:
        if os.pwrite(self._handle, data, offset) != len(data):
            raise OSError("the journal could not be written whole")
