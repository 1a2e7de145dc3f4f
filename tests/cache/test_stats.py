"""Stats add up at any moment; health says what is degraded; a closed cache says so."""

from collections.abc import Callable
from typing import Any

import pytest

from hicache.cache import Cache, UnifiedRadixCache
from hicache.errors import ClosedError
from hicache.storage import PageStore
from hicache.storage.memory import MemoryBackend
from hicache.transfer import Load, ThreadExecutor
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import MODELS, PAGE, World, tokens

PROMPT = tokens(*range(4 * PAGE + 1))


@pytest.mark.parametrize("model", sorted(MODELS))
def test_slots_are_free_cached_or_other_and_sizes_are_those_of_the_model(model):
    hand = HandExecutor()
    world = World(MODELS[model], executor=hand)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    world.cache.load_back(match)
    assert world.allocate(match, 1)
    stats = world.cache.stats()
    by_place = {(pool.pool, pool.tier): pool for pool in stats.pools}
    for pool in stats.pools:
        assert pool.free + pool.cached + pool.other == pool.slots, pool
        assert pool.slots == (world.device_pages if pool.tier is Tier.DEVICE else world.host_pages)
        taken = world.cache.taken_slots(pool.pool, pool.tier)
        assert len(taken) == pool.cached + pool.other and (taken[1:] > taken[:-1]).all()
        owner = next(one for one in MODELS[model].pools if one.name == pool.pool)
        assert pool.slot_bytes == owner.slot_bytes
    kv = by_place["kv", Tier.DEVICE]
    assert (kv.cached, kv.other) == (0, 5)
    assert (by_place["kv", Tier.HOST].cached, by_place["kv", Tier.HOST].other) == (4, 0)
    assert (stats.in_flight, stats.open_matches) == (1, 1)
    assert stats.pins >= 2
    hand.run(Load)
    world.cache.poll()
    stats = world.cache.stats()
    kv = next(pool for pool in stats.pools if (pool.pool, pool.tier) == ("kv", Tier.DEVICE))
    assert (kv.cached, kv.other, stats.in_flight) == (4, 1, 0)
    world.cache.release(match)
    world.idle()


def test_the_hit_rate_has_its_denominator():
    world = World()
    assert world.cache.stats().hit_rate == 0.0
    world.serve(PROMPT)
    assert world.cache.stats().hit_rate == 0.0
    world.serve(PROMPT)
    stats = world.cache.stats()
    assert stats.lookup_tokens == 2 * (4 * PAGE + 1)
    assert stats.hit_tokens == {Tier.DEVICE: 4 * PAGE, Tier.HOST: 0, Tier.STORAGE: 0}
    assert stats.hit_rate == 4 * PAGE / (2 * (4 * PAGE + 1))
    assert stats.counters["hit_tokens_device"] == 4 * PAGE
    assert stats.counters["lookups"] == 2


@pytest.mark.parametrize("model", sorted(MODELS))
def test_bytes_that_were_copied_and_slots_that_were_reclaimed_are_counted(model):
    hand = HandExecutor()
    world = World(MODELS[model], executor=hand)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    assert load is not None and load.tokens == 4 * PAGE
    hand.settle(world.cache.poll)
    stats = world.cache.stats()
    page_bytes = next(pool.slot_bytes for pool in stats.pools if pool.pool == "kv")
    assert stats.counters["backup_bytes"] >= 4 * page_bytes
    assert stats.counters["load_bytes"] >= 4 * page_bytes
    assert stats.group.device_reservations >= 2
    assert stats.group.host_reservations == 1
    assert stats.group.pools == ()
    free = {pool.pool: pool.free for pool in stats.pools if pool.tier is Tier.DEVICE}
    assert not world.allocate(match, (free["kv"] + 1) * PAGE)
    refused = {counts.pool for counts in world.cache.stats().group.pools if counts.refusals}
    assert "kv" in refused
    world.cache.release(match)
    world.idle()


def test_taking_stats_changes_nothing():
    world = World()
    world.serve(PROMPT)
    assert world.cache.stats() == world.cache.stats()


def test_health_tells_why_a_store_is_not_in_use_until_one_is():
    class Sick(MemoryBackend):
        def health(self) -> tuple[str, ...]:
            return ("the disk is full",)

    world = World()
    assert world.cache.health() == ()
    world.cache.run_without_storage("the folder can't be written")
    assert world.cache.health() == ("the folder can't be written",)
    world.cache.attach_storage_backend(PageStore(Sick()))
    assert world.cache.health() == ("the disk is full",)
    world.cache.detach_storage_backend()
    assert world.cache.health() == ()


@pytest.mark.parametrize("executor", [ThreadExecutor, HandExecutor])
def test_closing_settles_what_is_in_flight_and_returns_the_memory(executor):
    closed = []

    class Told(MemoryBackend):
        def close(self) -> None:
            closed.append(self)
            super().close()

    world = World(executor=executor(), backend=Told(), timeout_s=10.0)
    world.serve(PROMPT)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.allocate(match, PAGE)
    world.cache.prefetch(tokens(*range(50, 70)), world.namespace)
    group = world.cache.controller.mem_pool_host
    world.cache.close()
    world.cache.close()
    assert len(closed) == 1
    assert len(world.cache.controller.state.dispatcher) == 0
    with pytest.raises(ClosedError):
        group.alloc(1)
    with pytest.raises(ClosedError):
        _ = group.get_pool().pages


def test_a_store_that_cannot_be_closed_does_not_keep_the_memory():
    class Stuck(MemoryBackend):
        def close(self) -> None:
            raise OSError("the disk is gone")

    world = World(backend=Stuck())
    group = world.cache.controller.mem_pool_host
    with pytest.raises(OSError, match="the disk is gone"):
        world.cache.close()
    with pytest.raises(ClosedError):
        group.alloc(1)


CALLS: dict[str, Callable[[Any], object]] = {
    "prefetch": lambda world: world.cache.prefetch(PROMPT, world.namespace),
    "cancel_prefetch": lambda world: world.cache.cancel_prefetch(world.ticket),
    "match_prefix": lambda world: world.cache.match_prefix(PROMPT, world.namespace),
    "load_back": lambda world: world.cache.load_back(world.match),
    "allocate": lambda world: world.cache.allocate(world.match, 1),
    "insert": lambda world: world.cache.insert(world.match, PROMPT),
    "release": lambda world: world.cache.release(world.match),
    "poll": lambda world: world.cache.poll(),
    "evict": lambda world: world.cache.evict(Tier.DEVICE),
    "attach": lambda world: world.cache.attach_storage_backend(PageStore(MemoryBackend())),
    "detach": lambda world: world.cache.detach_storage_backend(),
    "stats": lambda world: world.cache.stats(),
    "audit": lambda world: world.cache.audit(),
    "taken_slots": lambda world: world.cache.taken_slots("kv", Tier.HOST),
}


@pytest.mark.parametrize("call", sorted(CALLS))
def test_a_closed_cache_says_so(call):
    world: Any = World()
    world.match = world.cache.match_prefix(PROMPT, world.namespace)
    world.ticket = world.cache.prefetch(PROMPT, world.namespace)
    world.cache.close()
    with pytest.raises(ClosedError, match="build a new one"):
        CALLS[call](world)


def test_the_cache_has_a_short_name():
    assert Cache is UnifiedRadixCache
