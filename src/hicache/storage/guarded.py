"""A backend behind two breakers, one for reading and one for writing: a full store is still read from."""

from collections.abc import Callable, Sequence

import numpy as np

from hicache.errors import StorageError
from hicache.storage.breaker import Breaker, BreakerState
from hicache.storage.protocol import (
    Buffers,
    Cleared,
    EachPageBackend,
    ReadResult,
    RegistersMemory,
    StorageBackend,
    StorageKey,
)
from hicache.units import BoolArray


class GuardedBackend:
    """Passes calls on while the breaker of their side lets them; else it answers at once that nothing was done."""

    def __init__(self, inner: StorageBackend, reading: Breaker, writing: Breaker) -> None:
        self.inner = inner
        self.reading = reading
        self.writing = writing

    def register(self, arenas: Sequence[memoryview]) -> None:
        """Passed on, where the backend wants to know it."""
        if isinstance(self.inner, RegistersMemory):
            self.inner.register(arenas)

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """As the inner backend; nothing while reading is paused."""
        with self.reading.call() as call:
            if call is None:
                return np.zeros(len(keys), dtype=np.bool_)
            found = self.inner.contains(keys)
            call.ok = True
            return found

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """As the inner backend; every page has failed while reading is paused."""
        return self._read(len(keys), lambda: self.inner.read(keys, values))

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """As the inner backend; nothing is written while writing is paused."""
        return self._write(len(keys), lambda: self.inner.write(keys, values))

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """As the inner backend; everything stays while writing is paused."""
        with self.writing.call() as call:
            if call is None:
                return np.zeros(len(keys), dtype=np.bool_)
            gone = self.inner.delete(keys)
            call.ok = True
            return gone

    def clear(self, namespace: bytes) -> Cleared:
        """As the inner backend. Raises StorageError while writing is paused."""
        with self.writing.call() as call:
            if call is None:
                raise StorageError("writing to the store is paused because it failed; try again later")
            cleared = self.inner.clear(namespace)
            call.ok = True
            return cleared

    def health(self) -> tuple[str, ...]:
        """The inner backend's, and what is paused."""
        paused = [
            f"{side} the store is paused: it failed, or took too long"
            for side, breaker in (("reading from", self.reading), ("writing to", self.writing))
            if breaker.stats().state is not BreakerState.CLOSED
        ]
        return (*self.inner.health(), *paused)

    def close(self) -> None:
        """Closes the inner backend."""
        self.inner.close()

    def _read(self, pages: int, read: Callable[[], ReadResult]) -> ReadResult:
        with self.reading.call() as call:
            if call is None:
                result = ReadResult.nothing(pages)
                result.failed[:] = True
                return result
            result = read()
            call.ok = pages == 0 or not bool(result.failed.all())
            return result

    def _write(self, pages: int, write: Callable[[], BoolArray]) -> BoolArray:
        with self.writing.call() as call:
            if call is None:
                return np.zeros(pages, dtype=np.bool_)
            written = write()
            call.ok = pages == 0 or bool(written.any())
            return written


class GuardedEachPage(GuardedBackend):
    """The same for a backend that may be called so that each page passes the CPU once."""

    def __init__(self, inner: EachPageBackend, reading: Breaker, writing: Breaker) -> None:
        super().__init__(inner, reading, writing)
        self._each = inner

    def read_each(
        self, keys: Sequence[StorageKey], values: Sequence[Buffers], is_good: Callable[[int], bool]
    ) -> ReadResult:
        """As the inner backend; every page has failed while reading is paused."""
        return self._read(len(keys), lambda: self._each.read_each(keys, values, is_good))

    def write_each(
        self, keys: Sequence[StorageKey], values: Sequence[Buffers], fill: Callable[[int], None]
    ) -> BoolArray:
        """As the inner backend; nothing is written while writing is paused."""
        return self._write(len(keys), lambda: self._each.write_each(keys, values, fill))


def guarded(backend: StorageBackend, reading: Breaker, writing: Breaker) -> GuardedBackend:
    """The backend behind these breakers, with all that it can do."""
    if isinstance(backend, EachPageBackend):
        return GuardedEachPage(backend, reading, writing)
    return GuardedBackend(backend, reading, writing)
