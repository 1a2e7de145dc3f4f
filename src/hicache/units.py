"""Names for ids, ranges and sizes: a value says what it counts, and device slots are never host slots."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, NewType, TypeAlias

import numpy as np

Int32Array: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
BoolArray: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
ByteArray: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

PoolName: TypeAlias = str
"""A pool is named by a string (`kv`, `swa`, `state`, ...): the set is open."""

DeviceSlots = NewType("DeviceSlots", np.ndarray[Any, np.dtype[np.int32]])
"""Slots of a device pool, int32, one per page (or per snapshot)."""

HostSlots = NewType("HostSlots", np.ndarray[Any, np.dtype[np.int32]])
"""Slots of a host pool, int32, one per page (or per snapshot)."""

HOLE = -1
"""In a run of slots: nothing is resident at this page."""


class Tier(Enum):
    """Where bytes lie: device memory (L1), host memory (L2), storage (L3)."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages `start` to `stop` (exclusive), counted from the start of a prefix."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` to `stop` (exclusive) of a host page."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start
