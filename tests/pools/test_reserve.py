"""A reservation takes every slot that is asked for or none, and reclaims pools in one fixed order."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from hicache.errors import ClosedError, ConfigError, InvariantError
from hicache.pools import HostPool, HostPoolGroup, PoolEntry
from hicache.units import DeviceSlots, Tier
from tests.pools.helpers import ALL, Reclaim, device_slots, entry, fill_cache, group, host_slots, with_reclaim


def three(*, slots: int = 8) -> tuple[HostPoolGroup, dict[str, Reclaim]]:
    """kv, swa and the anchor `state`, each with a cache that can be evicted."""
    entries: list[PoolEntry] = []
    reclaims: dict[str, Reclaim] = {}
    for name in ("kv", "swa", "state"):
        made, reclaims[name] = with_reclaim(entry(name, slots=slots, anchor=name == "state"))
        entries.append(made)
    return group(*entries), reclaims


def free_slots(made: HostPoolGroup) -> dict[str, int]:
    made.check()
    return {each.name: each.host_pool.available for each in made.entries}


def test_commit_hands_over_and_leaving_without_it_frees() -> None:
    made, _ = three()
    with made.reserve({"kv": 2, "state": 1}, Tier.HOST) or pytest.fail() as kept:
        slots = kept.commit()
    assert {name: len(taken) for name, taken in slots.items()} == {"state": 1, "kv": 2}
    with made.reserve({"kv": 3}, Tier.HOST) or pytest.fail():
        assert free_slots(made)["kv"] == 3
    with pytest.raises(RuntimeError), made.reserve({"swa": 3}, Tier.HOST) or pytest.fail():
        raise RuntimeError
    assert free_slots(made) == {"state": 7, "kv": 6, "swa": 8}


def test_a_reservation_settles_once() -> None:
    made, _ = three()
    reservation = made.reserve({"kv": 2}, Tier.HOST)
    assert reservation is not None
    reservation.commit()
    for again in (reservation.commit, reservation.cancel, reservation.__enter__):
        with pytest.raises(InvariantError, match="before"):
            again()
    assert free_slots(made)["kv"] == 6


def test_what_can_not_be_met_evicts_nothing_in_any_pool() -> None:
    made, reclaims = three()
    for name in reclaims:
        fill_cache(made, reclaims[name], name, 8)
    reclaims["swa"].kept = reclaims["swa"].kept[:3]
    assert made.reserve({"kv": 2, "swa": 4, "state": 1}, Tier.HOST) is None
    assert [reclaim.asked for reclaim in reclaims.values()] == [[], [], []]
    assert free_slots(made) == {"state": 0, "kv": 0, "swa": 0}


def test_eviction_gets_the_absolute_count_not_the_shortfall() -> None:
    made, reclaims = three()
    fill_cache(made, reclaims["kv"], "kv", 6)
    assert made.reserve({"kv": 5}, Tier.HOST) is not None
    assert reclaims["kv"].asked == [5]


def test_pools_are_reclaimed_once_each_the_anchor_first() -> None:
    made, reclaims = three()
    order: list[str] = []
    for name, reclaim in reclaims.items():
        fill_cache(made, reclaim, name, 8)
        reclaim.asked = Order(name, order)
    assert made.reserve({"swa": 1, "kv": 1, "state": 1}, Tier.HOST) is not None
    assert order == ["state", "kv", "swa"]


class Order(list[int]):
    """Writes the pool's name down whenever it is asked."""

    def __init__(self, name: str, order: list[str]) -> None:
        super().__init__()
        self._name = name
        self._order = order

    def append(self, count: int) -> None:
        self._order.append(self._name)
        super().append(count)


def test_shortages_are_counted_again_after_each_pool() -> None:
    made, reclaims = three()
    for name in ("kv", "swa", "state"):
        fill_cache(made, reclaims[name], name, 8)
    anchor, swa = reclaims["state"], reclaims["swa"]

    class TakesSwaAlong(Order):
        def append(self, count: int) -> None:
            super().append(count)
            swa.evict(count)
            swa.asked.clear()

    anchor.asked = TakesSwaAlong("state", [])
    assert made.reserve({"state": 4, "swa": 3}, Tier.HOST) is not None
    assert swa.asked == []
    assert free_slots(made) == {"state": 0, "kv": 0, "swa": 1}


def test_an_eviction_that_frees_too_little_leaves_all_taken_slots_free() -> None:
    lying = replace(entry("swa"), host_evict_fn=lambda count: None, host_evictable_fn=lambda: 8)
    made = group(entry("kv"), lying)
    made.alloc(8, "swa")
    assert made.reserve({"kv": 2, "swa": 1}, Tier.HOST) is None
    assert free_slots(made) == {"kv": 8, "swa": 0}


def test_an_eviction_that_raises_leaves_every_pool_as_it_was() -> None:
    made, reclaims = three()
    for name in reclaims:
        fill_cache(made, reclaims[name], name, 8)

    class Fails(Order):
        def append(self, count: int) -> None:
            raise OSError("the store is gone")

    reclaims["swa"].asked = Fails("swa", [])
    with pytest.raises(OSError, match="the store is gone"):
        made.reserve({"kv": 2, "swa": 2, "state": 2}, Tier.HOST)
    assert free_slots(made) == {"state": 2, "kv": 2, "swa": 0}


def test_demand_for_a_pool_that_takes_no_slots_is_a_named_error() -> None:
    made = group(entry("kv"), entry("indexer", derived_from="kv"))
    with pytest.raises(ConfigError, match="'swa' is not registered"):
        made.reserve({"kv": 1, "swa": 1}, Tier.HOST)
    with pytest.raises(ConfigError, match="'indexer' lives at the slots of 'kv'"):
        made.reserve({"kv": 1, "indexer": 1}, Tier.HOST)
    with pytest.raises(InvariantError, match="-1 slots asked of pool 'kv'"):
        made.reserve({"kv": -1}, Tier.HOST)
    with pytest.raises(InvariantError, match="storage"):
        made.reserve({"kv": 1}, Tier.STORAGE)
    assert free_slots(made)["kv"] == 8


def test_device_slots_come_from_the_engines_functions() -> None:
    held: list[int] = []
    made = group(
        replace(
            entry("kv"),
            device_alloc_fn=lambda count: device_slots(*range(10, 10 + count)),
            device_free_fn=lambda slots: held.extend(slots.tolist()),
            device_available_fn=lambda: 4,
        )
    )
    assert made.reserve({"kv": 5}, Tier.DEVICE) is None
    with made.reserve({"kv": 2}, Tier.DEVICE) or pytest.fail() as taken:
        assert taken.slots["kv"].tolist() == [10, 11]
    assert held == [10, 11]


def test_an_engine_that_gives_too_few_device_slots_is_found_out() -> None:
    freed: list[DeviceSlots] = []
    made = group(
        entry("swa"),
        replace(entry("kv"), device_alloc_fn=lambda count: device_slots(3), device_free_fn=freed.append),
    )
    with pytest.raises(InvariantError, match="'kv' gave 1 device slots for 2"):
        made.reserve({"swa": 2, "kv": 2}, Tier.DEVICE)
    assert [slots.tolist() for slots in freed] == [[3]]
    everything = made.reserve({"swa": 8}, Tier.DEVICE)
    assert everything is not None


def test_a_device_side_that_is_missing_is_a_named_error() -> None:
    without = replace(entry("kv"), device_alloc_fn=None, device_free_fn=None, device_available_fn=None)
    with pytest.raises(ConfigError, match="'kv' has no device_alloc_fn"):
        group(without).reserve({"kv": 1}, Tier.DEVICE)


def test_alloc_and_free_mean_the_anchor_and_evict_nothing() -> None:
    made, reclaims = three()
    fill_cache(made, reclaims["state"], "state", 8)
    assert made.alloc(1) is None and reclaims["state"].asked == []
    taken = made.alloc(2, "swa")
    assert taken is not None and free_slots(made)["swa"] == 6
    with pytest.raises(InvariantError):
        made.free(taken, "kv")
    made.free(taken, "swa")
    assert free_slots(made)["swa"] == 8


def test_derived_pools_are_never_allocated_or_freed_themselves() -> None:
    made = group(entry("kv"), entry("indexer", derived_from="kv"))
    taken = made.alloc(2)
    assert taken is not None
    with pytest.raises(ConfigError, match="'indexer' lives at the slots of 'kv'"):
        made.alloc(1, "indexer")
    with pytest.raises(ConfigError, match="'indexer' lives at the slots of 'kv'"):
        made.free(taken, "indexer")


class ClosingPool(HostPool):
    """Remembers that it was closed, and may fail at it."""

    closed = 0
    fails = False

    def close(self) -> None:
        self.closed += 1
        if self.fails:
            raise OSError("can't unmap")
        super().close()


def closing(name: str, derived_from: str | None = None) -> tuple[PoolEntry, ClosingPool]:
    made = entry(name, derived_from=derived_from)
    pool = ClosingPool(name, made.host_pool.layout, 8, made.host_pool.arena, ALL)
    return replace(made, host_pool=pool), pool


def test_close_destroys_every_pool_once_and_ends_all_use() -> None:
    (kv, kv_pool), (indexer, indexer_pool), (swa, swa_pool) = closing("kv"), closing("indexer", "kv"), closing("swa")
    made = group(kv, indexer, swa)
    made.close()
    made.close()
    assert (kv_pool.closed, indexer_pool.closed, swa_pool.closed) == (1, 1, 1)
    uses: list[Callable[[], object]] = [
        lambda: made.alloc(1),
        lambda: made.free(host_slots()),
        lambda: made.reserve({"kv": 1}, Tier.HOST),
        lambda: made.add_entry(entry("x")),
        lambda: made.release_transfers([]),
        lambda: made.release_device_transfers([]),
        lambda: made.resolve_host_transfers([], primary_device_indices=None, primary_host_indices=None),
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()


@pytest.mark.parametrize("failing", [0, 1])
def test_close_goes_on_to_the_other_pools_when_one_fails(failing: int) -> None:
    (kv, kv_pool), (swa, swa_pool) = closing("kv"), closing("swa")
    made = group(kv, swa)
    (kv_pool, swa_pool)[failing].fails = True
    with pytest.raises(OSError, match="can't unmap"):
        made.close()
    assert (kv_pool.closed, swa_pool.closed) == (1, 1)
