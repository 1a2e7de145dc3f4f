"""Values that go in and out of the tree name nodes and absolute page positions: a split in between harms none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from hicache.coverage import Coverage
from hicache.tree.node import Node
from hicache.tree.runs import EMPTY_SLOTS
from hicache.units import Int32Array, PoolName, Tier


@dataclass(frozen=True, slots=True)
class TreePool:
    """A pool with slots of its own, as the tree sees it; the first one given is the anchor.

    `slot_bytes` (what a slot holds, with the pools derived from it) and `device_slots` are for eviction policies that
    look at them; None: not known.
    """

    name: PoolName
    coverage: Coverage
    slot_bytes: int = 1
    device_slots: int | None = None


class Pin(Enum):
    """What a pin keeps."""

    HERE = "here"
    """The device copy stays."""
    SOMEWHERE = "somewhere"
    """The last copy stays, whichever tier it is in."""
    HOST = "host"
    """The host copy stays: a transfer reads or writes it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Pages `start` to `stop` (exclusive, counted from the root) of the prefix that ends in `node`."""

    node: Node
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class TreeMatch(NamedTuple):
    """What the tree knows of a prompt's prefix: `pages` of it are keyed, `device_pages` can be resumed as they are,
    `usable_pages` with loads. A value: it pins nothing, and is good until the tree changes unless its pages are pinned.
    """

    namespace: bytes
    path: Sequence[Node]
    """The nodes from below the root down to the one that holds page `pages` - 1."""
    pages: int
    device_pages: int
    usable_pages: int


class PinPart(NamedTuple):
    """One pool's share of a receipt: pages `start` to `stop` of the prefix that ends in `node`."""

    pool: int
    node: Node
    start: int
    stop: int
    last_page_only: bool
    """Only page `stop` - 1 is pinned, not the node that holds it."""


class Receipt(NamedTuple):
    """A pin, to be given back once. `spine` is the node that the pools of full coverage are pinned at, if they are."""

    serial: int
    pin: Pin
    spine: Node | None
    guard: Node | None
    """The node whose prefix keeps its last copies for the sake of this receipt's other pools, if there is one."""
    parts: tuple[PinPart, ...]


class InsertResult(NamedTuple):
    """`match` covers the whole inserted prefix; `duplicates` are the given slots that were not taken, per pool;
    `added` counts those that were."""

    match: TreeMatch
    duplicates: Mapping[PoolName, Int32Array]
    added: Mapping[PoolName, int]


@dataclass(frozen=True, slots=True)
class Eviction:
    """Slots that left the tree, per tier and pool. They are the caller's to free."""

    freed: Mapping[Tier, Mapping[PoolName, Int32Array]] = field(default_factory=dict)

    def slots(self, pool: PoolName, tier: Tier) -> Int32Array:
        """The slots of one pool that left one tier; int32, maybe empty."""
        return self.freed.get(tier, {}).get(pool, EMPTY_SLOTS)

    def count(self, pool: PoolName, tier: Tier) -> int:
        """How many slots of one pool left one tier."""
        return len(self.slots(pool, tier))
