"""An eviction policy is a sort key per node, the lowest goes first: an order, never a permission."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias


class SortKey(Protocol):
    """A number, or a tuple of numbers. All keys of a policy compare with each other; none is NaN."""

    def __lt__(self, other: Any, /) -> bool:
        """Whether a node with this key goes before one with the other."""


class Wish(NamedTuple):
    """What a request asks for the pages that it uses and puts in: see `Priority`."""

    priority: int = 0
    ttl_s: float | None = None
    """Seconds, without end if None."""


NO_WISH = Wish()


class NodeUse(Protocol):
    """What a policy may look at. Compared by identity, and good as a key of a dict while it is in the tree."""

    @property
    def tick(self) -> int:
        """When the node was last used, in uses of the tree."""

    @property
    def hits(self) -> int:
        """How many requests used the node, or one below it."""

    @property
    def start(self) -> int:
        """The node's first page, counted from the root."""

    @property
    def born(self) -> int:
        """When the node's pages came into the tree, in uses of the tree."""


class EvictionPolicy(Protocol):
    """Orders the nodes that may be evicted.

    One whose keys follow from a node alone needs no more than this; one that keeps books of its own, has a bound or
    looks at the time is a `StatefulPolicy`. An instance serves one cache.
    """

    @property
    def name(self) -> str:
        """What settings call it."""

    @property
    def keys_fall(self) -> bool:
        """Whether a use can lower a node's key; the node is then queued again at once."""

    def key(self, node: NodeUse) -> SortKey:
        """The node's sort key now. Of equal keys the one nearer to the root goes first; between two of the same place
        nothing is said, so a key that can be equal ends with the tick."""


class TreeView(Protocol):
    """What a policy with books of its own may ask of the tree."""

    @property
    def tick(self) -> int:
        """The uses of the tree so far."""

    @property
    def now_s(self) -> float:
        """Seconds since the tree was first told the time, as all ranks agree; it moves with `expired`."""

    @property
    def device_pages(self) -> int | None:
        """How many pages the first pool holds on the device, if the tree was told."""

    def pages(self, node: NodeUse) -> int:
        """How many pages a node has, whatever tiers they are in."""

    def tokens_saved(self, node: NodeUse) -> tuple[int, int]:
        """The tokens that a request is spared by what the node adds, from the first to one past the last.

        They reach from the last place before the node at which all pools can resume to the last such place in it:
        with snapshots, from one to the next. Equal if nobody can resume in the node.
        """

    def bytes_kept(self, node: NodeUse) -> float:
        """What the node holds in all pools, each page once, in units of what a token takes when every pool has it."""


Nodes: TypeAlias = Sequence[NodeUse]


class StatefulPolicy:
    """Base of the policies that are told what happens. Every method may be left as it is: it then does nothing.

    Where nodes are returned, they are those whose key has fallen by the call; the tree queues them again. A key that
    rose need not be told.
    """

    def begin(self, tree: TreeView) -> None:
        """A tree without nodes uses the policy from now on; books about another are void."""

    def used(self, node: NodeUse, wish: Wish) -> Nodes:
        """A request uses the node: its hit is counted already. Told of each node of a prefix, from the root down."""
        return ()

    def filled(self, node: NodeUse, wish: Wish) -> Nodes:
        """A request put pages into the node, or would have if they had not been there; it may be new."""
        return ()

    def split(self, node: NodeUse, head: NodeUse) -> None:
        """The node's first pages are now in `head`, a new node, whose key must not differ for that."""

    def shrunk(self, node: NodeUse) -> None:
        """The node lost its last pages."""

    def taken(self, node: NodeUse) -> None:
        """The node is the first in the order, and something of it is about to be evicted."""

    def gone(self, node: NodeUse) -> None:
        """The node has left the tree: nothing will be asked about it again."""

    def expired(self) -> Nodes:
        """The tree's `now_s` has changed."""
        return ()


class Lru:
    """The least recently used node goes first."""

    name = "lru"
    keys_fall = False

    def key(self, node: NodeUse) -> SortKey:
        """The tick of the last use."""
        return node.tick
