"""An eviction policy is a sort key per node, the lowest goes first: an order, never a permission."""

from typing import Protocol, TypeAlias

SortKey: TypeAlias = int | float


class NodeUse(Protocol):
    """What a policy may look at."""

    @property
    def tick(self) -> int:
        """When the node was last used, in uses of the tree."""

    @property
    def hits(self) -> int:
        """How many requests used the node, or a node below it that has gone."""

    @property
    def start(self) -> int:
        """The node's first page, counted from the root."""


class EvictionPolicy(Protocol):
    """Orders the nodes that may be evicted."""

    @property
    def name(self) -> str:
        """What settings call it."""

    @property
    def keys_fall(self) -> bool:
        """Whether a use can lower a node's key; the node is then queued again at once."""

    def key(self, node: NodeUse) -> SortKey:
        """The node's sort key now. Ties go to the node nearer to the root, then to the one used longer ago."""


class Lru:
    """The least recently used node goes first."""

    name = "lru"
    keys_fall = False

    def key(self, node: NodeUse) -> SortKey:
        """The tick of the last use."""
        return node.tick
