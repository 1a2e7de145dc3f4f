"""A slot is free or held, exactly one of them; a wrong free changes nothing."""

import numpy as np

from hicache.errors import InvariantError
from hicache.units import ByteArray, Int32Array

_FEW_SLOTS = 24
"""Up to this many slots, a loop is quicker than calls into numpy."""


class SlotAllocator:
    """Hands out slots `reserved` to `size - 1`, in ascending order, so that runs are contiguous where they can be.

    Free slots lie in a sorted array that is used up from its start; freed ones wait aside and are sorted in when it
    runs short. So a slot costs a constant amount on average, whatever the order of frees.
    """

    def __init__(self, size: int, reserved: int = 0) -> None:
        if not 0 <= reserved <= size:
            raise InvariantError(f"a pool of {size} slots can't reserve {reserved} of them")
        self._size = size
        self._reserved = reserved
        self._flags = bytearray(size)
        self._held: ByteArray = np.frombuffer(self._flags, np.uint8)
        self._order: Int32Array = np.arange(size, dtype=np.int32)
        self._last_seen: Int32Array = np.zeros(size, np.int32)
        self._sorted: Int32Array = self._order[reserved:].copy()
        self._next = 0
        self._returned: list[Int32Array] = []
        self._available = size - reserved

    @property
    def size(self) -> int:
        """All slots, reserved ones included."""
        return self._size

    @property
    def reserved(self) -> int:
        """The first slots, which are never handed out."""
        return self._reserved

    @property
    def available(self) -> int:
        """Slots that are free now."""
        return self._available

    def alloc(self, count: int) -> Int32Array | None:
        """`count` slots, ascending, or None when fewer are free."""
        if count < 0:
            raise InvariantError(f"asked for {count} slots")
        if count > self._available:
            return None
        if self._next + count > len(self._sorted):
            self._sort_in()
        slots = self._sorted[self._next : self._next + count].copy()
        self._next += count
        self._available -= count
        self._mark_held(slots)
        return slots

    def free(self, slots: Int32Array) -> None:
        """Takes slots back. Raises InvariantError, with nothing changed, unless every one is held and named once."""
        given = np.array(slots, np.int32)
        if len(given) <= _FEW_SLOTS:
            self._release_few(given)
        else:
            self._release_many(given)
        self._returned.append(given)
        self._available += len(given)

    def require_held(self, slots: Int32Array) -> None:
        """Raises InvariantError unless every slot is one that was handed out and not yet given back."""
        if len(slots) and not (slots.min() >= 0 and slots.max() < self._size):
            raise InvariantError(f"a slot is not one of this pool's {self._size}: {_some(slots)}")
        held = self._held[slots]
        if np.count_nonzero(held) != len(slots):
            raise InvariantError(f"slots are reserved, or free already: {_some(slots[held == 0])}")

    def taken(self) -> Int32Array:
        """The slots that are held, ascending."""
        return np.flatnonzero(self._held).astype(np.int32)

    def check(self) -> None:
        """Raises InvariantError unless every slot is exactly one of reserved, free and held."""
        free = np.concatenate([self._sorted[self._next :], *self._returned])
        owners = np.bincount(free, minlength=self._size) + self._held
        owners[: self._reserved] += 1
        if not np.array_equal(owners, np.ones(self._size, owners.dtype)):
            raise InvariantError(f"slots with no owner or two: {_some(self._order[owners != 1])}")
        if len(free) != self._available:
            raise InvariantError(f"{len(free)} slots are free, but {self._available} are counted")

    def _mark_held(self, slots: Int32Array) -> None:
        if len(slots) > _FEW_SLOTS:
            self._held[slots] = 1
            return
        for slot in slots.tolist():
            self._flags[slot] = 1

    def _release_few(self, slots: Int32Array) -> None:
        flags = self._flags
        named = slots.tolist()
        for done, slot in enumerate(named):
            if not (0 <= slot < self._size and flags[slot]):
                for released in named[:done]:
                    flags[released] = 1
                raise InvariantError(f"slot {slot} is reserved, foreign, free already or named twice: {_some(slots)}")
            flags[slot] = 0

    def _release_many(self, slots: Int32Array) -> None:
        self.require_held(slots)
        order = np.arange(len(slots), dtype=np.int32)
        self._last_seen[slots] = order
        if not np.array_equal(self._last_seen[slots], order):
            raise InvariantError(f"a slot is named twice in one free: {_some(slots)}")
        self._held[slots] = 0

    def _sort_in(self) -> None:
        rest = np.concatenate([self._sorted[self._next :], *self._returned])
        rest.sort()
        self._sorted = rest
        self._next = 0
        self._returned = []


def _some(slots: Int32Array) -> str:
    shown = ", ".join(str(slot) for slot in slots[:8])
    return shown if len(slots) <= 8 else f"{shown}, ... ({len(slots)} in all)"
