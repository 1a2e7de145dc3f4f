"""Wrappers around a storage backend that fail, delay, hold and count calls; they compose, and a seed replays them."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np

from hicache.errors import StorageError
from hicache.storage.protocol import Buffers, Cleared, ReadResult, StorageBackend, StorageKey
from hicache.units import BoolArray


class Operation(Enum):
    """A call of a backend that moves or looks up pages."""

    CONTAINS = "contains"
    READ = "read"
    WRITE = "write"
    DELETE = "delete"
    CLEAR = "clear"


class Fault(Enum):
    """What goes wrong with one page."""

    MISS = "miss"
    """`contains` and `read`: not there. `write` and `delete`: refused."""
    FAIL = "fail"
    """`read`: the store could not answer. Elsewhere as MISS."""
    FLIP = "flip"
    """`read`: says ok, with one bit wrong. `write`: one bit is wrong in what is stored. Elsewhere nothing."""
    STALE = "stale"
    """`read`: says ok, but the buffers were not filled. Elsewhere nothing."""
    RAISE = "raise"
    """The whole call raises StorageError, before anything is done."""


Chooser: TypeAlias = Callable[[Operation, StorageKey], Fault | None]
"""Says, page by page, what goes wrong."""


def seeded_faults(seed: int, rates: Mapping[Fault, float]) -> Chooser:
    """Each page meets each fault with its rate (they sum to at most 1); a seed replays them."""
    source = random.Random(seed)
    lock = threading.Lock()

    def choose(operation: Operation, key: StorageKey) -> Fault | None:
        with lock:
            drawn = source.random()
        for fault, rate in rates.items():
            drawn -= rate
            if drawn < 0:
                return fault
        return None

    return choose


def page_faults(operation: Operation, faults: Mapping[bytes, Fault]) -> Chooser:
    """The pages with these keys meet these faults in this operation, every time, in every pool."""

    def choose(asked: Operation, key: StorageKey) -> Fault | None:
        return faults.get(key.page) if asked is operation else None

    return choose


class FaultyBackend:
    """Passes calls on, except where `choose` names a fault. `choose` may be replaced at any time."""

    def __init__(self, inner: StorageBackend, choose: Chooser) -> None:
        self.inner = inner
        self.choose = choose

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """As the inner backend, without the pages that meet MISS or FAIL."""
        faults = self._faults(Operation.CONTAINS, keys)
        return self.inner.contains(keys) & ~_is(faults, Fault.MISS, Fault.FAIL)

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """As the inner backend, with every fault but what its page meets."""
        faults = self._faults(Operation.READ, keys)
        result = ReadResult.nothing(len(keys))
        result.failed[:] = _is(faults, Fault.FAIL)
        result.ok[:] = _is(faults, Fault.STALE) & self.inner.contains(keys)
        asked = [i for i, fault in enumerate(faults) if fault is None or fault is Fault.FLIP]
        inner = self.inner.read([keys[i] for i in asked], [values[i] for i in asked])
        result.ok[asked], result.damaged[asked], result.failed[asked] = inner.ok, inner.damaged, inner.failed
        for i in asked:
            if faults[i] is Fault.FLIP and result.ok[i]:
                _flip(values[i][-1])
        return result

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """As the inner backend; a page that meets MISS or FAIL is not written, one that meets FLIP is written wrong."""
        faults = self._faults(Operation.WRITE, keys)
        asked = [i for i, fault in enumerate(faults) if fault not in (Fault.MISS, Fault.FAIL)]
        given = [_flipped(values[i]) if faults[i] is Fault.FLIP else values[i] for i in asked]
        stored = np.zeros(len(keys), dtype=np.bool_)
        stored[asked] = self.inner.write([keys[i] for i in asked], given)
        return stored

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """As the inner backend; a page that meets MISS or FAIL stays."""
        faults = self._faults(Operation.DELETE, keys)
        asked = [i for i, fault in enumerate(faults) if fault not in (Fault.MISS, Fault.FAIL)]
        gone = np.zeros(len(keys), dtype=np.bool_)
        gone[asked] = self.inner.delete([keys[i] for i in asked])
        return gone

    def clear(self, namespace: bytes) -> Cleared:
        """As the inner backend: `choose` is asked about single pages."""
        return self.inner.clear(namespace)

    def health(self) -> tuple[str, ...]:
        """The inner backend's."""
        return self.inner.health()

    def close(self) -> None:
        """Closes the inner backend."""
        self.inner.close()

    def _faults(self, operation: Operation, keys: Sequence[StorageKey]) -> list[Fault | None]:
        faults = [self.choose(operation, key) for key in keys]
        if Fault.RAISE in faults:
            raise StorageError(f"planned failure of {operation.value}")
        return faults


class HeldBackend:
    """Passes calls on, but an operation that is held waits until it is released. Tests need no clock with it."""

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner
        self._changed = threading.Condition()
        self._held: set[Operation] = set()
        self._waiting: list[Operation] = []

    def hold(self, operation: Operation) -> None:
        """Calls of this operation wait from now on."""
        with self._changed:
            self._held.add(operation)

    def release(self, operation: Operation) -> None:
        """Lets the waiting calls go, and later ones pass."""
        with self._changed:
            self._held.discard(operation)
            self._changed.notify_all()

    def wait_until_held(self, operation: Operation, timeout_s: float = 10.0) -> bool:
        """Waits until a call of this operation is waiting; False if none came within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: operation in self._waiting, timeout_s)

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """As the inner backend, when it isn't held."""
        self._pass(Operation.CONTAINS)
        return self.inner.contains(keys)

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """As the inner backend, when it isn't held."""
        self._pass(Operation.READ)
        return self.inner.read(keys, values)

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """As the inner backend, when it isn't held."""
        self._pass(Operation.WRITE)
        return self.inner.write(keys, values)

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """As the inner backend, when it isn't held."""
        self._pass(Operation.DELETE)
        return self.inner.delete(keys)

    def clear(self, namespace: bytes) -> Cleared:
        """As the inner backend, when it isn't held."""
        self._pass(Operation.CLEAR)
        return self.inner.clear(namespace)

    def health(self) -> tuple[str, ...]:
        """The inner backend's."""
        return self.inner.health()

    def close(self) -> None:
        """Closes the inner backend."""
        self.inner.close()

    def _pass(self, operation: Operation) -> None:
        with self._changed:
            self._waiting.append(operation)
            self._changed.notify_all()
            self._changed.wait_for(lambda: operation not in self._held)
            self._waiting.remove(operation)


class SlowBackend:
    """Passes calls on after a delay: `delay_s(operation, pages)` seconds."""

    def __init__(
        self,
        inner: StorageBackend,
        delay_s: Callable[[Operation, int], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner = inner
        self._delay_s = delay_s
        self._sleep = sleep

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """As the inner backend, later."""
        self._sleep(self._delay_s(Operation.CONTAINS, len(keys)))
        return self.inner.contains(keys)

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """As the inner backend, later."""
        self._sleep(self._delay_s(Operation.READ, len(keys)))
        return self.inner.read(keys, values)

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """As the inner backend, later."""
        self._sleep(self._delay_s(Operation.WRITE, len(keys)))
        return self.inner.write(keys, values)

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """As the inner backend, later."""
        self._sleep(self._delay_s(Operation.DELETE, len(keys)))
        return self.inner.delete(keys)

    def clear(self, namespace: bytes) -> Cleared:
        """As the inner backend, later."""
        self._sleep(self._delay_s(Operation.CLEAR, 0))
        return self.inner.clear(namespace)

    def health(self) -> tuple[str, ...]:
        """The inner backend's."""
        return self.inner.health()

    def close(self) -> None:
        """Closes the inner backend."""
        self.inner.close()


@dataclass(slots=True)
class Meter:
    """What passed through in one operation. Bytes are those of values that were answered with yes."""

    calls: int = 0
    pages: int = 0
    good_pages: int = 0
    value_bytes: int = 0


@dataclass(slots=True)
class MeteredBackend:
    """Passes calls on and counts them."""

    inner: StorageBackend
    meters: dict[Operation, Meter] = field(default_factory=lambda: {operation: Meter() for operation in Operation})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """As the inner backend."""
        return self._count(Operation.CONTAINS, self.inner.contains(keys), ())

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """As the inner backend."""
        result = self.inner.read(keys, values)
        self._count(Operation.READ, result.ok, values)
        return result

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """As the inner backend."""
        return self._count(Operation.WRITE, self.inner.write(keys, values), values)

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """As the inner backend."""
        return self._count(Operation.DELETE, self.inner.delete(keys), ())

    def clear(self, namespace: bytes) -> Cleared:
        """As the inner backend."""
        cleared = self.inner.clear(namespace)
        with self._lock:
            meter = self.meters[Operation.CLEAR]
            meter.calls += 1
            meter.pages += cleared.pages + cleared.left_pages
            meter.good_pages += cleared.pages
        return cleared

    def health(self) -> tuple[str, ...]:
        """The inner backend's."""
        return self.inner.health()

    def close(self) -> None:
        """Closes the inner backend."""
        self.inner.close()

    def _count(self, operation: Operation, good: BoolArray, values: Sequence[Buffers]) -> BoolArray:
        moved = sum(part.nbytes for value, yes in zip(values, good, strict=False) if yes for part in value)
        with self._lock:
            meter = self.meters[operation]
            meter.calls += 1
            meter.pages += len(good)
            meter.good_pages += int(good.sum())
            meter.value_bytes += moved
        return good


def _is(faults: Sequence[Fault | None], *wanted: Fault) -> BoolArray:
    return np.array([fault in wanted for fault in faults], dtype=np.bool_)


def _flip(part: memoryview) -> None:
    view = part.cast("B")
    view[len(view) // 2] ^= 1


def _flipped(value: Buffers) -> Buffers:
    copy = memoryview(bytearray(value[-1].cast("B")))
    _flip(copy)
    return [*value[:-1], copy]
