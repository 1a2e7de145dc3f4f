"""S14: what a lookup pins it gives back, whether or not anything was loaded; at idle everything may be evicted."""

import pytest

from hicache.transfer import Load
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import MODELS, PAGE, World, tokens

PROMPT = tokens(*range(5 * PAGE + 1))


@pytest.fixture(params=sorted(MODELS))
def world(request) -> World:
    world = World(MODELS[request.param], executor=HandExecutor())
    world.serve(PROMPT)
    world.executor.settle(world.cache.poll)
    return world


def all_can_go(world: World) -> None:
    world.executor.settle(world.cache.poll)
    world.idle()
    assert world.free_and_evictable(Tier.DEVICE) == world.device_pages
    assert world.free_and_evictable(Tier.HOST) == world.host_pages
    assert world.cache.evict(Tier.DEVICE) + world.cache.evict(Tier.HOST) > 0
    assert all(pool.cached == 0 for pool in world.cache.stats().pools if pool.pool == "kv")
    world.idle()


def test_a_device_hit_loads_nothing_and_leaves_no_pin(world: World):
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert match.device_tokens == 5 * PAGE
    assert match.host_tokens == 0
    load = world.cache.load_back(match)
    assert load.done
    assert load.result() == 5 * PAGE
    assert not world.executor.of(Load)
    world.cache.release(match)
    all_can_go(world)


@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize("on_host", [False, True])
def test_repeated_lookups_of_one_request(world: World, times, on_host):
    if on_host:
        world.cache.evict(Tier.DEVICE)
    matches = [world.cache.match_prefix(PROMPT, world.namespace) for _ in range(times)]
    assert world.cache.stats().pins > 0
    for match in reversed(matches):
        world.cache.release(match)
    assert world.cache.stats().pins == 0
    all_can_go(world)


def test_one_match_that_is_loaded_again_and_again(world: World):
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    pins = set()
    for _ in range(4):
        load = world.cache.load_back(match)
        world.executor.settle(world.cache.poll)
        assert load.result() == 5 * PAGE
        pins.add(world.cache.stats().pins)
    assert len(pins) == 1
    world.cache.release(match)
    all_can_go(world)


def test_a_lookup_of_what_is_not_there(world: World):
    for prompt in (tokens(9, 9, 9, 9, 9), PROMPT[:4], b""):
        match = world.cache.match_prefix(prompt, world.namespace)
        assert match.device_tokens == match.host_tokens == 0
        world.cache.load_back(match)
        world.cache.release(match)
    all_can_go(world)
