"""S14: however often a request leaves and comes back, its pins go back to none, and everything can be evicted."""

import pytest

from tests.cache.retracting import ANSWER, all_is_given_back, away, empty_device, restored, running
from tests.world import KINDS, World


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("model", sorted(KINDS))
def test_pins_do_not_grow_with_the_times_it_leaves(model, policy):
    world = World(KINDS[model], write_policy=policy, device_pages=24)
    match = running(world)
    world.settle()
    pins: dict[str, set[int]] = {"away": set(), "back": set()}
    for turn in range(4):
        retracted = away(world, match)
        world.settle()
        pins["away"].add(world.cache.stats().pins)
        if turn % 2:
            empty_device(world)
        assert restored(world, retracted) == match.length_tokens
        pins["back"].add(world.cache.stats().pins)
    assert pins == {"away": {1}, "back": {1}}
    assert world.decode(match, ANSWER, checkpoint=True)
    world.check(match)
    world.cache.release(match)
    assert world.cache.stats().pins == 0 or world.cache.in_flight
    all_is_given_back(world)
