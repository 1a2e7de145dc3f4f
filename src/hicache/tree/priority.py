"""Higher priorities stay longer until their time has passed, and never take more than their share of the pool."""

import heapq
from math import inf
from typing import NamedTuple

from hicache.tree.bounded import Bounded, bound, require_share
from hicache.tree.policy import Nodes, NodeUse, SortKey, StatefulPolicy, TreeView, Wish

_COMPACT_FROM = 1024


class _Asked(NamedTuple):
    wish: Wish
    until_s: float


class Priority(StatefulPolicy):
    """The lowest priority goes first, within one the least recently used; what has expired goes before all.

    A node has the highest priority of the requests that used it or put it in, with the longest `ttl_s` of those that
    asked for that priority; each use starts its time anew. After that time it goes first, until somebody uses it
    again: then it has what that request asks for.

    Nodes above priority 0 have at most `share` of the device pool's pages, in whatever tier they are. Beyond it those
    of the lowest priority, and of these the ones used longest ago, count as priority 0 until they are used again.
    """

    name = "priority"
    keys_fall = False

    def __init__(self, share: float = 0.5) -> None:
        self._share = require_share(share, "the share of pages above priority 0")

    def begin(self, tree: TreeView) -> None:
        """Nobody has asked for anything yet."""
        self._tree = tree
        self._most = bound(self._share, tree.device_pages)
        self._asked: dict[NodeUse, _Asked] = {}
        """Every node that is in the tree, once its pages are."""
        self._levels: dict[int, Bounded] = {}
        """The nodes above 0 that stay longer, by priority; no level is empty."""
        self._ends: list[tuple[float, int, NodeUse]] = []
        self._next_end: dict[NodeUse, float] = {}
        """The entry of `_ends` that holds for a node; others are void."""
        self._watched = 0

    def key(self, node: NodeUse) -> SortKey:
        """Its priority, as far as that counts, then the tick of its last use."""
        asked = self._asked.get(node)
        if asked is None:
            return (0, node.tick)
        if asked.until_s <= self._tree.now_s:
            return (-inf, node.tick)
        priority = asked.wish.priority
        return (priority if priority < 0 or self._favoured(node, priority) else 0, node.tick)

    def _favoured(self, node: NodeUse, priority: int) -> bool:
        level = self._levels.get(priority)
        return level is not None and node in level

    def used(self, node: NodeUse, wish: Wish) -> Nodes:
        """Joins what the request asks for with what others did."""
        asked = self._asked.get(node)
        now_s = self._tree.now_s
        if asked is not None and asked.until_s > now_s:
            wish = max(asked.wish, wish, key=_strength)
        self._forget(node)
        until_s = now_s + _seconds(wish)
        self._asked[node] = _Asked(wish, until_s)
        self._watch(node, until_s)
        if wish.priority <= 0:
            return (node,) if asked is None else ()
        self._levels.setdefault(wish.priority, Bounded()).put(node, self._tree.pages(node))
        return self._shed()

    filled = used

    def _watch(self, node: NodeUse, until_s: float) -> None:
        if until_s < self._next_end.get(node, inf):
            self._watched += 1
            self._next_end[node] = until_s
            heapq.heappush(self._ends, (until_s, self._watched, node))

    def _shed(self) -> Nodes:
        fell = []
        while sum(level.total for level in self._levels.values()) > self._most:
            priority = min(self._levels)
            node = self._levels[priority].first
            self._leave(node, priority)
            fell.append(node)
        return fell

    def _leave(self, node: NodeUse, priority: int) -> None:
        level = self._levels.get(priority)
        if level is not None:
            level.discard(node)
            if not len(level):
                del self._levels[priority]

    def split(self, node: NodeUse, head: NodeUse) -> None:
        """Both parts are asked for."""
        asked = self._asked.get(node)
        if asked is None:
            return
        self._asked[head] = asked
        self._watch(head, asked.until_s)
        if self._favoured(node, asked.wish.priority):
            level = self._levels[asked.wish.priority]
            level.resize(node, self._tree.pages(node))
            level.put(head, self._tree.pages(head))

    def shrunk(self, node: NodeUse) -> None:
        """It counts for less."""
        asked = self._asked.get(node)
        if asked is not None and self._favoured(node, asked.wish.priority):
            self._levels[asked.wish.priority].resize(node, self._tree.pages(node))

    def gone(self, node: NodeUse) -> None:
        """Nobody asks for it any more."""
        self._forget(node)
        if self._next_end.pop(node, None) is not None and len(self._ends) > _COMPACT_FROM + 2 * len(self._next_end):
            self._ends = [entry for entry in self._ends if self._next_end.get(entry[2]) == entry[0]]
            heapq.heapify(self._ends)

    def _forget(self, node: NodeUse) -> None:
        asked = self._asked.pop(node, None)
        if asked is not None:
            self._leave(node, asked.wish.priority)

    def expired(self) -> Nodes:
        """The nodes whose time has passed."""
        fell = []
        while self._ends and self._ends[0][0] <= self._tree.now_s:
            until_s, _, node = heapq.heappop(self._ends)
            if self._next_end.get(node) != until_s:
                continue
            del self._next_end[node]
            asked = self._asked.get(node)
            if asked is None:
                continue
            if asked.until_s > self._tree.now_s:
                self._watch(node, asked.until_s)
                continue
            self._leave(node, asked.wish.priority)
            fell.append(node)
        return fell


def _seconds(wish: Wish) -> float:
    return inf if wish.ttl_s is None else wish.ttl_s


def _strength(wish: Wish) -> tuple[int, float]:
    return (wish.priority, _seconds(wish))
