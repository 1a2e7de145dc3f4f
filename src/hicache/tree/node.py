"""A node is a run of whole pages; a split takes pages off its front, so its last page stays where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.tree.runs import Run

if TYPE_CHECKING:
    from hicache.tree.accounts import Account

DEVICE = 0
HOST = 1

USELESS = 1
"""Flag: the node is a leaf whose last pages can't be used by anyone, in any tier."""
HELD = 2
"""Flag: the node counts as pinned on the device, since a last copy that must stay lies there."""
HOLEY = 4
"""Flag: a page of the pools of full coverage has no copy in any tier."""
STRAY = 8
"""Flag: bad data was taken from under a pinned page of another pool, which stays though it is of no use."""
QUEUED = 16
"""From this bit on, one bit per eviction queue: the node has an entry there."""

NO_CHILDREN: dict[bytes, Node] = {}
"""Shared by all leaves; never written to."""


class Node:
    """A run of pages below `parent`, with what is resident of it per tier and pool.

    `here`, `some` and `below` count this node's own pins and those of each child that has any: a walk up stops where
    a count was or stays above zero. The root has no pages and no parent; so has a node that was removed.
    """

    __slots__ = (
        "account",
        "below",
        "born",
        "children",
        "device",
        "device_pages",
        "double_pages",
        "flags",
        "here",
        "hits",
        "host",
        "host_pages",
        "key",
        "keys",
        "parent",
        "pins",
        "some",
        "start",
        "stored",
        "tick",
    )

    def __init__(
        self,
        key: bytes,
        parent: Node | None,
        start: int,
        tick: int,
        device: tuple[Run, ...],
        host: tuple[Run, ...],
        account: Account,
    ) -> None:
        self.account = account
        self.key = key
        """The tokens of its pages, as the tree compares them."""
        self.children = NO_CHILDREN
        """By the first page of their keys."""
        self.parent = parent
        self.start = start
        """Position of its first page, counted from the root."""
        self.tick = tick
        self.born = tick
        self.hits = 0
        self.device = device
        self.host = host
        """Per pool, the slots in each tier."""
        self.device_pages = 0
        self.host_pages = 0
        self.double_pages = 0
        """Pages that the pools of full coverage have in each tier, and in both at once."""
        self.here = 0
        """Pins of the device copies (pools of full coverage), own and of children with any."""
        self.some = 0
        """Pins of the last copies (pools of full coverage), own and of children with any."""
        self.below = 0
        """Children that have, or have below them, device pages of full coverage."""
        self.pins: list[int] | None = None
        """Pins of single pools and of host copies: see `pins`. None while there is none."""
        self.flags = 0
        self.keys: bytes | None = None
        """The page keys, 32 bytes each, once they were asked for; the root's is the namespace fingerprint."""
        self.stored: dict[int, tuple[int, bytes]] | None = None
        """Per pool: the storage attachment, and one byte per page: 1 if the page is stored there."""

    def __lt__(self, other: Node) -> bool:
        return self.tick < other.tick
