"""Every reclaim, refusal and rollback is counted for the pool that it was about, in its tier."""

from dataclasses import replace

import pytest

from hicache.pools import GroupCounts, HostPoolGroup, PoolCounts
from hicache.units import Tier
from tests.pools.helpers import entry, fill_cache, group, with_reclaim


def full() -> HostPoolGroup:
    """The anchor kv and swa, each with 8 host slots, all of them cached and evictable."""
    kv, of_kv = with_reclaim(entry("kv"))
    swa, of_swa = with_reclaim(entry("swa"))
    made = group(kv, swa)
    fill_cache(made, of_kv, "kv", 8)
    fill_cache(made, of_swa, "swa", 8)
    return made


def test_a_new_group_has_counted_nothing() -> None:
    assert group(entry("kv")).counts() == GroupCounts()


def test_reservations_that_are_met_are_counted_by_tier() -> None:
    made = group(entry("kv"))
    for tier in (Tier.HOST, Tier.DEVICE, Tier.HOST):
        assert made.reserve({"kv": 1}, tier) is not None
    assert made.reserve({"kv": 0}, Tier.DEVICE) is not None
    assert made.counts() == GroupCounts((), 1, 2)


def test_reclaims_are_counted_with_the_slots_they_freed() -> None:
    made = full()
    assert made.reserve({"kv": 3, "swa": 2}, Tier.HOST) is not None
    assert made.reserve({"kv": 1}, Tier.HOST) is not None
    kv = PoolCounts("kv", Tier.HOST, reclaims=2, reclaimed_slots=4)
    swa = PoolCounts("swa", Tier.HOST, reclaims=1, reclaimed_slots=2)
    assert made.counts() == GroupCounts((kv, swa), host_reservations=2)


def test_a_refusal_is_counted_for_the_pools_that_lack_slots() -> None:
    made = full()
    assert made.reserve({"kv": 8, "swa": 9}, Tier.HOST) is None
    assert made.reserve({"kv": 9, "swa": 9}, Tier.HOST) is None
    assert made.reserve({"kv": 9}, Tier.DEVICE) is None
    assert {(counts.pool, counts.tier): counts.refusals for counts in made.counts().pools} == {
        ("kv", Tier.HOST): 1,
        ("swa", Tier.HOST): 2,
        ("kv", Tier.DEVICE): 1,
    }
    assert not any(counts.reclaims or counts.rollbacks for counts in made.counts().pools)


def test_a_pool_that_falls_short_after_evicting_undoes_the_reservation() -> None:
    late = replace(entry("swa"), host_evict_fn=lambda count: None, host_evictable_fn=lambda: 8)
    made = group(entry("kv"), late)
    made.alloc(8, "swa")
    assert made.reserve({"kv": 2, "swa": 1}, Tier.HOST) is None
    assert made.counts() == GroupCounts((PoolCounts("swa", Tier.HOST, reclaims=1, rollbacks=1),))


@pytest.mark.parametrize("part", ["evict", "alloc"])
def test_a_pool_that_raises_undoes_the_reservation(part: str) -> None:
    def broken(count: int) -> None:
        raise RuntimeError("it broke")

    if part == "evict":
        swa = replace(entry("swa"), device_evict_fn=broken, device_evictable_fn=lambda: 8)
        demand = {"kv": 1, "swa": 9}
    else:
        swa = replace(entry("swa"), device_alloc_fn=broken)
        demand = {"kv": 1, "swa": 1}
    made = group(entry("kv"), swa)
    with pytest.raises(RuntimeError, match="it broke"):
        made.reserve(demand, Tier.DEVICE)
    (counts,) = made.counts().pools
    assert (counts.pool, counts.tier, counts.rollbacks) == ("swa", Tier.DEVICE, 1)
    assert counts.reclaims == (part == "evict")
    assert made.counts().device_reservations == 0
