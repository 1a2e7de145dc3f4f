"""How reservations went, in numbers that only grow: what each pool had to give up for them, and which ones it undid."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hicache.units import PoolName, Tier


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """One pool with slots of its own, in one tier. A pool that is derived from it gives and loses slots with it.

    `reclaims`: calls of its evict function, and `reclaimed_slots` the slots of its own that were free right after
    one. `refusals`: reservations that asked for more than it has free or could evict: nothing was touched.
    `rollbacks`: reservations that were undone after something was evicted or taken, since it then fell short (the
    rest is on its way out, written back first) or raised.
    """

    pool: PoolName
    tier: Tier
    reclaims: int = 0
    reclaimed_slots: int = 0
    refusals: int = 0
    rollbacks: int = 0


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """All pools that were ever asked for slots; `reservations` are those that were met, by tier."""

    pools: tuple[PoolCounts, ...] = ()
    device_reservations: int = 0
    host_reservations: int = 0


class ReservationCounter:
    """Counts for one group."""

    def __init__(self) -> None:
        self._pools: dict[tuple[PoolName, Tier], PoolCounts] = {}
        self._met = dict.fromkeys((Tier.DEVICE, Tier.HOST), 0)

    def met(self, tier: Tier) -> None:
        """A reservation was met."""
        self._met[tier] += 1

    def refused(self, pools: Iterable[PoolName], tier: Tier) -> None:
        """These pools could not have met a reservation, even by evicting."""
        for pool in pools:
            counts = self._of(pool, tier)
            self._pools[pool, tier] = replace(counts, refusals=counts.refusals + 1)

    def reclaimed(self, pool: PoolName, tier: Tier, slots: int) -> None:
        """The pool was told to evict, and has `slots` more free slots than before."""
        counts = self._of(pool, tier)
        self._pools[pool, tier] = replace(
            counts, reclaims=counts.reclaims + 1, reclaimed_slots=counts.reclaimed_slots + slots
        )

    def rolled_back(self, pool: PoolName, tier: Tier) -> None:
        """A reservation was undone because of this pool."""
        counts = self._of(pool, tier)
        self._pools[pool, tier] = replace(counts, rollbacks=counts.rollbacks + 1)

    def snapshot(self) -> GroupCounts:
        """The counts now."""
        return GroupCounts(tuple(self._pools.values()), self._met[Tier.DEVICE], self._met[Tier.HOST])

    def _of(self, pool: PoolName, tier: Tier) -> PoolCounts:
        return self._pools.get((pool, tier), PoolCounts(pool, tier))
