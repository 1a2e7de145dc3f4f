"""The policies by name: each is a sort key per node, and what it must remember for that."""

from collections.abc import Callable, Mapping

from hicache.tree.bounded import Bounded, bound, require_share
from hicache.tree.policy import EvictionPolicy, Lru, Nodes, NodeUse, SortKey, StatefulPolicy, TreeView, Wish
from hicache.tree.priority import Priority


class Fifo:
    """What came first goes first, used or not."""

    name = "fifo"
    keys_fall = False

    def key(self, node: NodeUse) -> SortKey:
        """The tick at which the node came."""
        return node.born


class Lfu:
    """The node that the fewest requests used goes first; of those, the least recently used. Nothing is forgotten."""

    name = "lfu"
    keys_fall = False

    def key(self, node: NodeUse) -> SortKey:
        """Its hits, then the tick of the last use."""
        return (node.hits, node.tick)


class Slru(StatefulPolicy):
    """Segmented LRU: nodes that were used again are protected, and go after all that were not.

    The protected ones have at most `share` of the device pool's pages, in whatever tier they are; beyond it the one
    that was used longest ago stands again behind all that are not protected, as if it had just come.
    """

    name = "slru"
    keys_fall = False

    def __init__(self, share: float = 0.8) -> None:
        self._share = require_share(share, "the protected share")

    def begin(self, tree: TreeView) -> None:
        """Nothing is protected yet."""
        self._tree = tree
        self._most = bound(self._share, tree.device_pages)
        self._protected = Bounded()
        self._since: dict[NodeUse, int] = {}
        """When a node that is or was protected was last used, or lost its protection."""

    def key(self, node: NodeUse) -> SortKey:
        """Whether it is protected, then when it was last used."""
        return (node in self._protected, self._since.get(node, node.tick))

    def used(self, node: NodeUse, wish: Wish) -> Nodes:
        """Protects it."""
        self._protected.put(node, self._tree.pages(node))
        self._since[node] = self._tree.tick
        fell = []
        while self._protected.total > self._most:
            last = self._protected.first
            self._protected.discard(last)
            self._since[last] = self._tree.tick
            fell.append(last)
        return fell

    def split(self, node: NodeUse, head: NodeUse) -> None:
        """Both parts are what the node was."""
        if node in self._since:
            self._since[head] = self._since[node]
        if node in self._protected:
            self._protected.resize(node, self._tree.pages(node))
            self._protected.put(head, self._tree.pages(head))

    def shrunk(self, node: NodeUse) -> None:
        """It counts for less."""
        if node in self._protected:
            self._protected.resize(node, self._tree.pages(node))

    def gone(self, node: NodeUse) -> None:
        """It counts no more."""
        self._protected.discard(node)
        self._since.pop(node, None)


class S3Fifo(StatefulPolicy):
    """Two queues, first in first out: a small one for what is new, a main one for what was used `to_main` times.

    After S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023). The main queue has at
    most 1 - `small` of the device pool's pages; beyond it, its head goes round again once for each use since (three at
    most), else it goes next. What differs: a node changes queues when it is used, not when it comes to the small
    queue's head; and there is no ghost queue, since a sort key can't tell of nodes that are not there. The host tier
    does that work: what left the device and is on the host keeps its hits, and joins the main queue when it is used.
    """

    name = "s3-fifo"
    keys_fall = False

    MOST_ROUNDS = 3

    def __init__(self, small: float = 0.1, to_main: int = 2) -> None:
        self._share = 1 - require_share(small, "the small queue's share")
        self._to_main = to_main

    def begin(self, tree: TreeView) -> None:
        """Both queues are empty."""
        self._tree = tree
        self._most = bound(self._share, tree.device_pages)
        self._main = Bounded()
        self._entered: dict[NodeUse, int] = {}
        self._rounds: dict[NodeUse, int] = {}
        self._entries = 0

    def key(self, node: NodeUse) -> SortKey:
        """Which queue it is in, then when it came there."""
        entered = self._entered.get(node)
        return (0, node.born) if entered is None else (1, entered)

    def used(self, node: NodeUse, wish: Wish) -> Nodes:
        """One more round in the main queue, or a place in it."""
        if node in self._main:
            self._rounds[node] = min(self.MOST_ROUNDS, self._rounds[node] + 1)
            return ()
        if node.hits < self._to_main:
            return ()
        self._rounds[node] = 0
        self._enter(node)
        return self._shed()

    def _enter(self, node: NodeUse) -> None:
        self._entries += 1
        self._entered[node] = self._entries
        self._main.put(node, self._tree.pages(node))

    def _shed(self) -> Nodes:
        fell = []
        while self._main.total > self._most:
            head = self._main.first
            if self._rounds[head]:
                self._rounds[head] -= 1
                self._enter(head)
            else:
                self.gone(head)
                fell.append(head)
        return fell

    def split(self, node: NodeUse, head: NodeUse) -> None:
        """Both parts are in the queue that the node was in."""
        if node in self._main:
            self._entered[head] = self._entered[node]
            self._rounds[head] = self._rounds[node]
            self._main.resize(node, self._tree.pages(node))
            self._main.put(head, self._tree.pages(head))

    def shrunk(self, node: NodeUse) -> None:
        """It counts for less."""
        if node in self._main:
            self._main.resize(node, self._tree.pages(node))

    def gone(self, node: NodeUse) -> None:
        """It is in no queue of its own any more."""
        self._main.discard(node)
        self._entered.pop(node, None)
        self._rounds.pop(node, None)


class CostAware(StatefulPolicy):
    """What saves the least computing per byte goes first, unless it was used lately.

    What a node saves is what Marconi counts (Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", arXiv
    2411.19379, section 4.2): the FLOPs of the tokens from the last place before it where a request could resume, the
    previous snapshot in a model with recurrent layers, over the bytes of all that is kept for them:

        saved(node) = sum(1 + p / even_at for p in first..stop) / bytes

    where a token at position p costs 1 for what does not depend on its position, and p / `even_at` for attention to
    all tokens before it; both are equal at `even_at` tokens. Bytes are in units of one token in all pools.

    Where Marconi adds a weight times this to a recency that is scaled anew for each choice, which no lasting sort key
    can do, uses are weighed as in GreedyDual-Size (Cao and Irani, USITS 1997):

        level at its last use + saved(node)

    is the key, and `level` the highest one that was evicted so far: a node that saves twice as much stays twice as long
    unused.
    """

    name = "cost-aware"
    keys_fall = False

    def __init__(self, even_at: int = 16_384) -> None:
        self._even_at = even_at

    def begin(self, tree: TreeView) -> None:
        """Nothing was evicted yet."""
        self._tree = tree
        self._level = 0.0
        self._keys: dict[NodeUse, float] = {}

    def key(self, node: NodeUse) -> SortKey:
        """What it was at its last use, then when that was."""
        return (self._keys.get(node, self._level), node.tick)

    def used(self, node: NodeUse, wish: Wish) -> Nodes:
        """Weighs it anew."""
        before = self._keys.get(node, self._level)
        now = self._keys[node] = self._level + self._saved(node)
        return (node,) if now < before else ()

    filled = used

    def _saved(self, node: NodeUse) -> float:
        first, stop = self._tree.tokens_saved(node)
        if stop <= first:
            return 0.0
        flops = (stop - first) * (1 + (first + stop) / (2 * self._even_at))
        return flops / self._tree.bytes_kept(node)

    def split(self, node: NodeUse, head: NodeUse) -> None:
        """Both parts stay as they are until they are used again."""
        if node in self._keys:
            self._keys[head] = self._keys[node]

    def taken(self, node: NodeUse) -> None:
        """Raises the level."""
        self._level = max(self._level, self._keys.get(node, self._level))

    def gone(self, node: NodeUse) -> None:
        """Forgets it."""
        self._keys.pop(node, None)


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    policy.name: policy for policy in (Lru, Fifo, Lfu, Slru, S3Fifo, Priority, CostAware)
}
"""What settings may name."""
