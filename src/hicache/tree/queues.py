"""Eviction queues are heaps with lazy entries: an entry is a hint, what it says is checked when it is taken out."""

import heapq
from typing import TypeAlias

from hicache.tree.node import QUEUED, Node
from hicache.tree.policy import EvictionPolicy, SortKey

Entry: TypeAlias = tuple[SortKey, int, Node]

_COMPACT_FROM = 1024


class Queues:
    """Heaps by number. A node's flag bit says that it has an entry; an entry without it is void.

    An entry's key may be lower than the node's key by now (it is then queued again when it comes up), never higher,
    except under a policy whose keys fall: `lowered` queues the node a second time.
    """

    def __init__(self, count: int, policy: EvictionPolicy) -> None:
        self.heaps: list[list[Entry]] = [[] for _ in range(count)]
        self._compact_at = [_COMPACT_FROM] * count
        self._key = policy.key

    def push(self, number: int, node: Node) -> None:
        """Queues a node, if it has no entry there yet."""
        bit = QUEUED << number
        if node.flags & bit:
            return
        node.flags |= bit
        heap = self.heaps[number]
        heapq.heappush(heap, (self._key(node), node.start, node))
        if len(heap) > self._compact_at[number]:
            self._compact(number)

    def lowered(self, node: Node) -> None:
        """Queues a node again wherever it has an entry, since its key fell."""
        for number, heap in enumerate(self.heaps):
            if node.flags & (QUEUED << number):
                heapq.heappush(heap, (self._key(node), node.start, node))
                if len(heap) > self._compact_at[number]:
                    self._compact(number)

    def peek(self, number: int) -> Entry | None:
        """The first entry whose node is there and whose key is the node's key now; it stays."""
        heap = self.heaps[number]
        bit = QUEUED << number
        while heap:
            key, _, node = heap[0]
            if node.parent is None or not node.flags & bit:
                heapq.heappop(heap)
                continue
            now = self._key(node)
            if key < now:
                heapq.heapreplace(heap, (now, node.start, node))
                continue
            return heap[0]
        return None

    def pop(self, number: int) -> Node:
        """Takes out what `peek` showed."""
        node = heapq.heappop(self.heaps[number])[2]
        node.flags &= ~(QUEUED << number)
        return node

    def _compact(self, number: int) -> None:
        """Leaves one entry per queued node, so that a heap stays within a fixed multiple of the nodes it is about."""
        bit = QUEUED << number
        nodes = {id(node): node for _, _, node in self.heaps[number] if node.parent is not None and node.flags & bit}
        heap = [(self._key(node), node.start, node) for node in nodes.values()]
        heapq.heapify(heap)
        self.heaps[number] = heap
        self._compact_at[number] = max(_COMPACT_FROM, 2 * len(heap))
