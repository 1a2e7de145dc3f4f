"""What the cache holds and what it was worth, as frozen numbers; taking them changes nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hicache.cache.match import Match
from hicache.cache.quotas import held_bytes
from hicache.controller import HybridCacheController
from hicache.controller.state import present
from hicache.pools import GroupCounts, SlotAllocator
from hicache.storage import PageStoreStats
from hicache.units import PoolName, Tier


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One pool in one tier. Counts are slots: free + cached + other = slots; other: lent, retracted, in flight."""

    pool: PoolName
    tier: Tier
    slots: int
    slot_bytes: int
    free: int
    cached: int
    other: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """`hit_tokens` by tier are part of `lookup_tokens`; `counters` are counts since the cache was built.

    `retracted` of the open matches were taken off the device and are not back. `group`: how reservations went.
    `tenant_bytes`: what each tenant with a quota has cached, and under "" all others; empty without quotas.
    """

    pools: tuple[PoolStats, ...]
    lookup_tokens: int
    hit_tokens: Mapping[Tier, int]
    in_flight: int
    open_matches: int
    pins: int
    counters: Mapping[str, int]
    storage: PageStoreStats | None
    retracted: int = 0
    group: GroupCounts = field(default_factory=GroupCounts)
    tenant_bytes: Mapping[str, Mapping[Tier, int]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Tokens that were not computed, over tokens asked for; 0 before the first lookup."""
        return sum(self.hit_tokens.values()) / self.lookup_tokens if self.lookup_tokens else 0.0


def cache_stats(
    controller: HybridCacheController, device_allocators: Mapping[PoolName, SlotAllocator], matches: Iterable[Match]
) -> CacheStats:
    """The numbers now."""
    state, store = controller.state, controller.storage
    held = list(matches)
    return CacheStats(
        pools=tuple(stats for pool in state.pools for stats in _pool_stats(controller, pool, device_allocators[pool])),
        lookup_tokens=state.counters.lookup_tokens,
        hit_tokens=dict(state.counters.hit_tokens),
        in_flight=len(state.dispatcher),
        open_matches=len(held),
        pins=state.tree.pins_total(),
        counters=state.counters.snapshot(),
        storage=store.stats() if store is not None else None,
        retracted=sum(match.away for match in held),
        group=state.group.counts(),
        tenant_bytes=held_bytes(state),
    )


def _pool_stats(
    controller: HybridCacheController, pool: PoolName, allocator: SlotAllocator
) -> tuple[PoolStats, PoolStats]:
    state = controller.state
    entry = state.group.get_entry(pool)
    device = entry.device_pool.geometry.slot_bytes + sum(
        draft.geometry.slot_bytes for draft in entry.packed_draft_device_pools
    )
    sizes = {
        Tier.DEVICE: (allocator.size - allocator.reserved, device, allocator.available),
        Tier.HOST: (entry.host_pool.slots, entry.host_pool.layout.page_bytes, entry.host_pool.available),
    }

    def stats(tier: Tier) -> PoolStats:
        slots, slot_bytes, free = sizes[tier]
        cached = len(present(state.tree.resident(pool, tier)))
        return PoolStats(pool, tier, slots, slot_bytes, free, cached, slots - free - cached)

    return stats(Tier.DEVICE), stats(Tier.HOST)
