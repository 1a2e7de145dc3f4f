"""Emptying a tier empties it in every pool, sidecars too."""

import pytest

from hicache.units import Tier
from tests.world import MODELS, PAGE, World, tokens


@pytest.mark.parametrize("model", ["one", "three"])
def test_emptying_the_device_leaves_no_pool_anything(model):
    world = World(MODELS[model])
    world.serve(tokens(*range(5 * PAGE)))
    world.settle()
    world.cache.evict(Tier.DEVICE)
    held = {pool.pool: pool.cached for pool in world.cache.stats().pools if pool.tier is Tier.DEVICE}
    assert held == dict.fromkeys(held, 0)
    world.cache.audit()
