"""Slots that leave the tree are collected as runs and handed out once, as arrays without holes."""

from hicache.tree import runs
from hicache.tree.core import Core
from hicache.tree.node import DEVICE, HOST, Node
from hicache.tree.runs import Run
from hicache.tree.values import Eviction
from hicache.units import Int32Array, PoolName, Tier

TIERS = (Tier.DEVICE, Tier.HOST)


class Freed:
    """Collects the slots that one call takes out of the tree."""

    __slots__ = ("counts", "pieces")

    def __init__(self, core: Core) -> None:
        self.counts = ([0] * len(core.pools), [0] * len(core.pools))
        """Slots collected so far, per tier and pool."""
        self.pieces: tuple[list[list[bytes]], list[list[bytes]]] = (
            [[] for _ in core.pools],
            [[] for _ in core.pools],
        )

    def add(self, node: Node, tier: int, pool: int, run: Run) -> None:
        """Takes the slots of a node's run, if there are any."""
        if run is not None:
            count = runs.count(run)
            self.pieces[tier][pool].append(run)
            self.counts[tier][pool] += count
            node.account.held[2 * pool + tier] -= count

    def add_all(self, node: Node) -> None:
        """Takes all slots of a node."""
        for tier, held in ((DEVICE, node.device), (HOST, node.host)):
            for pool, run in enumerate(held):
                self.add(node, tier, pool, run)

    def eviction(self, core: Core) -> Eviction:
        """What was collected, as a value."""
        freed: dict[Tier, dict[PoolName, Int32Array]] = {}
        for tier, of_pools in zip(TIERS, self.pieces, strict=True):
            arrays = {core.pools[pool].name: runs.solid(pieces) for pool, pieces in enumerate(of_pools) if pieces}
            arrays = {name: slots for name, slots in arrays.items() if len(slots)}
            if arrays:
                freed[tier] = arrays
        return Eviction(freed)
