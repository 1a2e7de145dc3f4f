"""What a policy may ask of the tree is answered from what the tree holds now, and changes nothing."""

from hicache.tree import runs
from hicache.tree.core import Core
from hicache.tree.node import Node
from hicache.tree.policy import NodeUse
from hicache.tree.reach import last_boundary, presence


class View:
    """The `TreeView` of one tree."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._token_bytes = sum(pool.slot_bytes for pool in core.pools) / core.page_size

    @property
    def tick(self) -> int:
        """The uses of the tree so far."""
        return self._core.clock

    @property
    def now_s(self) -> float:
        """Seconds since the tree was first told the time."""
        return self._core.now_s

    @property
    def device_pages(self) -> int | None:
        """How many pages the first pool holds on the device, if the tree was told."""
        return self._core.pools[0].device_slots

    def pages(self, node: NodeUse) -> int:
        """How many pages a node has."""
        return self._core.size(own(node))

    def tokens_saved(self, node: NodeUse) -> tuple[int, int]:
        """The tokens between the last place to resume at before the node, and the last in it; equal if it has none."""
        core, seen = self._core, own(node)
        stop = last_boundary(core, seen, core.stop(seen))
        start = last_boundary(core, seen, seen.start) if stop > seen.start else stop
        return (start * core.page_size, stop * core.page_size)

    def bytes_kept(self, node: NodeUse) -> float:
        """What the node holds in all pools, each page once, in units of what a token takes when every pool has it."""
        seen = own(node)
        kept = sum(runs.count(presence(seen, number)) * pool.slot_bytes for number, pool in enumerate(self._core.pools))
        return kept / self._token_bytes


def own(node: NodeUse) -> Node:
    """The node itself."""
    assert isinstance(node, Node)
    return node
