"""A run is immutable `bytes` of little-endian int32 slots, one per page, -1 a hole; a run without slots is None."""

from typing import TypeAlias

import numpy as np

from hicache.units import HOLE, BoolArray, Int32Array

SLOT_BYTES = 4
Run: TypeAlias = bytes | None

HOLE_SIGN = 0xFF
"""The last byte of a hole, and of no slot."""
HOLE_RUN = b"\xff\xff\xff\xff"
"""A run of one hole."""
_INT32 = np.dtype("<i4")

EMPTY_SLOTS: Int32Array = np.empty(0, np.int32)
EMPTY_SLOTS.flags.writeable = False


def run_of(slots: Int32Array) -> bytes:
    """The run that holds `slots` (int32, HOLE allowed)."""
    return np.ascontiguousarray(slots, _INT32).tobytes()


def or_none(run: bytes) -> Run:
    """The run, or None if it is all holes."""
    return run if run[3::4].strip(b"\xff") else None


def array(run: bytes) -> Int32Array:
    """A read-only view of a run, int32 per page."""
    return np.frombuffer(run, _INT32)


def expand(run: Run, pages: int) -> Int32Array:
    """The slots of a run of `pages` pages, holes where nothing is; read-only if the run has slots."""
    return np.full(pages, HOLE, np.int32) if run is None else np.frombuffer(run, _INT32)


def mask(run: Run, pages: int) -> BoolArray:
    """Which of the `pages` pages have a slot."""
    return np.zeros(pages, np.bool_) if run is None else np.frombuffer(run, _INT32) >= 0


def count(run: Run) -> int:
    """How many pages have a slot."""
    return 0 if run is None else len(run) // SLOT_BYTES - run[3::4].count(HOLE_SIGN)


def has_holes(run: bytes) -> bool:
    """Whether a page of the run has no slot."""
    return HOLE_SIGN in run[3::4]


def end(run: Run) -> int:
    """One past the last page that has a slot; 0 if none has."""
    return 0 if run is None else len(run[3::4].rstrip(b"\xff"))


def leading(run: Run) -> int:
    """How many pages from the start on have a slot, without a hole."""
    if run is None:
        return 0
    signs = run[3::4]
    hole = signs.find(HOLE_SIGN)
    return len(signs) if hole < 0 else hole


def either(first: Run, second: Run) -> Run:
    """A run that has a slot wherever one of the two has; which one is not said. For presence only."""
    if first is None:
        return second
    if second is None:
        return first
    return np.maximum(array(first), array(second)).tobytes()


def both(first: Run, second: Run) -> int:
    """How many pages have a slot in both runs."""
    if first is None or second is None:
        return 0
    signs = first[3::4]
    if signs == second[3::4]:
        return len(signs) - signs.count(HOLE_SIGN)
    return int(np.count_nonzero((array(first) >= 0) & (array(second) >= 0)))


def punch(run: bytes, gone: BoolArray) -> tuple[Run, bytes]:
    """The run without its slots at the pages of `gone` (bool per page), and those slots as a run without holes."""
    slots = array(run)
    taken = slots[gone & (slots >= 0)]
    left = slots.copy()
    left[gone] = HOLE
    return or_none(left.tobytes()), taken.tobytes()


def fill(run: Run, pages: int, offset: int, given: Int32Array, wanted: BoolArray) -> tuple[Run, Int32Array, int]:
    """Puts `given` (for the pages from `offset` on) into the holes of a run of `pages` pages, where `wanted` says so.

    Returns the run, what was given and not taken, and how many were taken.
    """
    slots = expand(run, pages).copy()
    part = slots[offset : offset + len(given)]
    offered = given >= 0
    taken = offered & wanted & (part < 0)
    part[taken] = given[taken]
    return or_none(slots.tobytes()), given[offered & ~taken], int(np.count_nonzero(taken))


def solid(pieces: list[bytes]) -> Int32Array:
    """All slots of some runs, holes left out; int32."""
    slots = np.frombuffer(b"".join(pieces), _INT32)
    return slots[slots >= 0] if has_holes(b"".join(pieces)) else slots
