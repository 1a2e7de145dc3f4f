"""S08: write-back, the host nearly full: making room for a load never takes what it, or a copy, still reads."""

import pytest

from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.transfer import Backup, Load
from hicache.units import HOLE, Tier
from tests.hand import HandExecutor
from tests.world import MODELS, PAGE, World, tokens

PROMPT = tokens(*range(4 * PAGE + 1))
OTHER = tokens(*range(1000, 1000 + 4 * PAGE + 1))
THIRD = tokens(*range(2000, 2000 + 4 * PAGE + 1))


def source_on_host(world: World, settle) -> None:
    """The prompt is on the host only, and the device is full of pages that the host does not have."""
    world.serve(PROMPT)
    world.cache.evict(Tier.DEVICE)
    settle()
    world.cache.evict(Tier.DEVICE)
    world.serve(OTHER)
    assert world.cached(PROMPT)[1] == 4 * PAGE


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("host_pages", [4, 5, 7, 8, 12])
def test_a_load_makes_room_without_taking_its_own_source(model, host_pages):
    hand = HandExecutor()
    world = World(MODELS[model], executor=hand, device_pages=6, host_pages=host_pages, write_policy="write_back")
    source_on_host(world, lambda: hand.settle(world.cache.poll))
    state = world.cache.controller.state
    match = world.cache.match_prefix(PROMPT, world.namespace)
    source = state.slots(match.resume(4), "kv", Tier.HOST).copy()
    load = world.cache.load_back(match)
    world.cache.audit()
    if load is None:
        (backup,) = hand.of(Backup)
        taken = {int(slot) for copy in backup.plan.copies for slot in copy.host_slots if copy.pool == "kv"}
        assert not taken & set(source.tolist()), "the copy goes elsewhere than into the load's source"
        assert world.cache.evict(Tier.HOST) == 0, "neither the source nor the copy's target can be taken"
        hand.run(Backup)
        world.cache.poll()
        load = world.cache.load_back(match)
    assert load is not None
    hand.run(Load)
    assert load.result() == 4 * PAGE
    world.check(match)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()
    dropped = world.cache.stats().counters["dropped_pages"]
    assert (dropped > 0) == (host_pages < 8), "what the host can't take is dropped, and counted"


def test_a_load_that_is_under_way_keeps_its_source():
    hand = HandExecutor()
    world = World(executor=hand, device_pages=12, host_pages=4, write_policy="write_back")
    source_on_host(world, lambda: hand.settle(world.cache.poll))
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    world.cache.release(match)
    assert world.cache.evict(Tier.HOST) == 0
    world.cache.evict(Tier.DEVICE)
    assert not hand.of(Backup), "there is no host page to be had"
    hand.run(Load)
    world.cache.poll()
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert match.device_tokens == 4 * PAGE
    world.check(match)
    world.cache.release(match)
    assert load.done
    hand.settle(world.cache.poll)
    world.idle()


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("seed", range(12))
def test_bytes_are_right_whatever_settles_when(model, seed):
    rates = FaultRates(start=0.3, fail=0.1, partial=0.1)
    world = World(
        MODELS[model],
        executor=SimulatedExecutor(seed, rates),
        device_pages=6,
        host_pages=4 + seed % 5,
        write_policy="write_back",
    )
    for turn in range(20):
        prompt = (PROMPT, OTHER, THIRD)[(seed + turn * 7) % 3]
        match = world.prefill(prompt)
        world.check(match)
        run = match.slots()
        assert len(set(run[run != HOLE].tolist())) == int((run != HOLE).sum())
        world.cache.release(match)
        world.cache.poll()
        world.cache.audit()
    world.settle()
    world.idle()
    assert world.free_and_evictable(Tier.DEVICE) == world.device_pages
    assert world.free_and_evictable(Tier.HOST) == world.host_pages
