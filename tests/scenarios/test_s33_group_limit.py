"""S33: one demand is larger than a pool, sidecars counted. It is refused, and usage is never above the limit."""

from dataclasses import replace

from hicache.pools import HostPool, HostPoolGroup, PoolTransfer
from hicache.units import HostSlots, Tier
from tests.pools.helpers import ALL, Reclaim, device_slots, entry, fill_cache, group, with_reclaim


class WatchedPool(HostPool):
    """Remembers the most slots that were ever held at once."""

    most = 0

    def alloc(self, count: int) -> HostSlots | None:
        slots = super().alloc(count)
        self.most = max(self.most, self.slots - self.available)
        return slots


def watched(name: str, slots: int) -> tuple[HostPoolGroup, WatchedPool, Reclaim]:
    """A large anchor and a sidecar of `slots` slots, full of pages that can be evicted."""
    made = entry(name, slots=slots)
    pool = WatchedPool(name, made.host_pool.layout, slots, made.host_pool.arena, ALL)
    sidecar, reclaim = with_reclaim(replace(made, host_pool=pool))
    whole = group(entry("kv", slots=50), sidecar)
    fill_cache(whole, reclaim, name, slots)
    return whole, pool, reclaim


def test_a_demand_beyond_a_sidecars_size_is_refused_and_evicts_nothing() -> None:
    made, pool, reclaim = watched("swa", 4)
    assert made.reserve({"kv": 10, "swa": 10}, Tier.HOST) is None
    wanted = [PoolTransfer("kv", device_slots(*range(5))), PoolTransfer("swa", device_slots(*range(5)))]
    assert made.resolve_host_transfers(wanted, primary_device_indices=None, primary_host_indices=None) is None
    assert reclaim.asked == [] and len(reclaim.kept) == 4
    assert made.get_pool("kv").available == 50
    assert pool.most == 4


def test_usage_stays_within_the_limit_while_the_cache_turns_over() -> None:
    made, pool, reclaim = watched("swa", 4)
    for count in (1, 4, 2, 3, 4, 4):
        reservation = made.reserve({"kv": 1, "swa": count}, Tier.HOST)
        assert reservation is not None
        reclaim.kept += reservation.commit()["swa"].tolist()
        made.check()
    assert pool.most == 4
    assert len(reclaim.kept) == 4
