"""Keeps values in this process's memory under a byte cap, in the same order of eviction as the file store."""

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from hicache.errors import ConfigError
from hicache.storage.chains import ChainIndex, EntryId, entry_id
from hicache.storage.gate import Gate
from hicache.storage.listing import StoredValue
from hicache.storage.protocol import Buffers, Cleared, ReadResult, StorageKey
from hicache.units import BoolArray


class MemoryBackend:
    """A StorageBackend for tests and single runs. `cap_bytes` bounds the bytes of all values; None: no bound."""

    def __init__(self, cap_bytes: int | None = None) -> None:
        if cap_bytes is not None and cap_bytes <= 0:
            raise ConfigError(f"cap is {cap_bytes} bytes; give a positive size, or none for no bound")
        self._cap_bytes = cap_bytes
        self._values: dict[EntryId, bytes] = {}
        self._labels: dict[bytes, str] = {}
        self._index = ChainIndex()
        self._clock = 0
        self._lock = threading.Lock()
        self._gate = Gate("memory store")

    @property
    def used_bytes(self) -> int:
        """Bytes of all values held now."""
        return self._index.total_bytes

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """Which pages are there now, shape [keys]."""
        with self._gate, self._lock:
            return np.array([entry_id(key) in self._values for key in keys], dtype=np.bool_)

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """Copies values into the buffers; one of another length is damaged, and dropped."""
        result = ReadResult.nothing(len(keys))
        with self._gate, self._lock:
            for i, (key, buffers) in enumerate(zip(keys, values, strict=True)):
                entry = entry_id(key)
                value = self._values.get(entry)
                if value is None:
                    continue
                if len(value) != sum(part.nbytes for part in buffers):
                    self._drop(entry)
                    result.damaged[i] = True
                    continue
                _scatter(value, buffers)
                self._index.touch(entry, self._tick())
                result.ok[i] = True
        return result

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """Copies each value in; False when it is larger than the cap, or only its own chain could make room."""
        stored = np.zeros(len(keys), dtype=np.bool_)
        with self._gate, self._lock:
            for i, (key, buffers) in enumerate(zip(keys, values, strict=True)):
                stored[i] = self._put(entry_id(key), buffers)
        return stored

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """True: a value was there and is gone. Shape [keys]."""
        with self._gate, self._lock:
            return np.array([self._drop(entry_id(key)) for key in keys], dtype=np.bool_)

    def clear(self, namespace: bytes) -> Cleared:
        """Lets go of every value of a namespace."""
        with self._gate, self._lock:
            entries = self._index.entries_in(namespace)
            size_bytes = sum(len(self._values[entry]) for entry in entries)
            self._labels.pop(namespace, None)
            return Cleared(sum(self._drop(entry) for entry in entries), size_bytes)

    def values(self) -> Sequence[StoredValue]:
        """Everything that is held now."""
        with self._gate, self._lock:
            index = self._index
            return [StoredValue(entry, len(value), index.last_used_ns(entry)) for entry, value in self._values.items()]

    def look(self, values: Sequence[StoredValue], buffers: Sequence[memoryview]) -> ReadResult:
        """Copies values without using them."""
        result = ReadResult.nothing(len(values))
        with self._gate, self._lock:
            for i, (value, buffer) in enumerate(zip(values, buffers, strict=True)):
                held = self._values.get(value.entry)
                if held is None:
                    continue
                result.ok[i] = len(held) == buffer.nbytes
                result.damaged[i] = not result.ok[i]
                if result.ok[i]:
                    buffer[:] = held
        return result

    def remove(self, values: Sequence[StoredValue]) -> Cleared:
        """Lets go of values."""
        with self._gate, self._lock:
            return sum((self._cleared(value.entry) for value in values), Cleared())

    def reclaim(self) -> int:
        """Nothing is left behind here: this store's life is one process."""
        return 0

    def trim(self, size_bytes: int) -> Cleared:
        """Lets go of tails until at most `size_bytes` are held."""
        cleared = Cleared()
        with self._gate, self._lock:
            while self._index.total_bytes > size_bytes and (victim := self._index.victim()):
                cleared = sum((self._cleared(entry) for entry in victim), cleared)
        return cleared

    def taken_bytes(self) -> int:
        """Bytes of all values."""
        return self.used_bytes

    def describe(self, namespace: bytes, text: str) -> None:
        """Keeps a text about a namespace."""
        with self._gate, self._lock:
            self._labels.setdefault(namespace, text)

    def descriptions(self) -> Mapping[bytes, str]:
        """The texts of all namespaces that have one."""
        with self._gate, self._lock:
            return dict(self._labels)

    def health(self) -> tuple[str, ...]:
        """Memory that can be had is well."""
        return ()

    def close(self) -> None:
        """Lets go of all values: this store's life is one process."""
        if self._gate.close():
            self._values.clear()
            self._index = ChainIndex()

    def _put(self, entry: EntryId, buffers: Buffers) -> bool:
        size_bytes = sum(part.nbytes for part in buffers)
        if self._cap_bytes is not None and (size_bytes > self._cap_bytes or self._index.is_behind_refused(entry)):
            self._index.refuse(entry)
            return False
        self._index.reserve(entry, size_bytes)
        if not self._make_room():
            self._index.cancel(entry, size_bytes)
            self._index.refuse(entry)
            return False
        self._values[entry] = b"".join(buffers)
        self._index.commit(entry, size_bytes, self._tick())
        return True

    def _make_room(self) -> bool:
        if self._cap_bytes is None:
            return True
        while self._index.total_bytes > self._cap_bytes:
            victim = self._index.victim()
            if not victim:
                return False
            for entry in victim:
                self._drop(entry)
        return True

    def _cleared(self, entry: EntryId) -> Cleared:
        size_bytes = self._index.size(entry)
        return Cleared(1, size_bytes) if size_bytes is not None and self._drop(entry) else Cleared()

    def _drop(self, entry: EntryId) -> bool:
        self._index.remove(entry)
        return self._values.pop(entry, None) is not None

    def _tick(self) -> int:
        self._clock = max(self._clock + 1, time.time_ns())
        return self._clock


def _scatter(value: bytes, buffers: Buffers) -> None:
    view = memoryview(value)
    for part in buffers:
        part[:] = view[: part.nbytes]
        view = view[part.nbytes :]
