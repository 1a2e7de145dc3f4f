"""S02: what a host hit, a storage hit and a hit on restored pages run on is what a device hit ran on, byte for byte."""

import numpy as np
import pytest

from hicache.cache import Match
from hicache.storage.memory import MemoryBackend
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.units import HOLE, Tier
from tests.world import KINDS, PAGE, World, tokens

PROMPT = tokens(*range(6 * PAGE + 2))


def bytes_of(world: World, match: Match) -> dict[str, np.ndarray]:
    """All bytes of every pool that resuming needs."""
    pages = match.length_tokens // PAGE
    found = {}
    for name, pool in world._device_pools():
        entry = world.cache.controller.mem_pool_host.get_entry(world._source(name))
        run = match.slots(world._source(name))
        required = entry.coverage.required(pages, PAGE)
        chosen = run[required.start : required.stop]
        assert not np.any(chosen == HOLE)
        found[name] = pool.stage(chosen)
    return found


@pytest.mark.parametrize("model", sorted(KINDS))
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_every_tier_gives_the_same_bytes(model, policy):
    world = World(
        KINDS[model], backend=MemoryBackend(), executor=SimulatedExecutor(1, FaultRates()), write_policy=policy
    )
    world.serve(PROMPT)

    def hit(tier: str) -> dict[str, np.ndarray]:
        ticket = world.cache.prefetch(PROMPT, world.namespace)
        world.settle()
        match = world.cache.match_prefix(PROMPT, world.namespace, ticket)
        world.finish_load(match)
        assert dict(match.cached_tokens) == {"device": 0, "host": 0, "storage": 0} | {tier: 6 * PAGE}
        found = bytes_of(world, match)
        world.cache.release(match)
        return found

    def forget(*tiers: Tier) -> None:
        for tier in tiers:
            world.settle()
            world.cache.evict(tier)
            world.settle()
            world.cache.evict(tier)

    expected = hit("device")
    for tiers, tier in (
        ([], "device"),
        ([Tier.DEVICE], "host"),
        ([], "device"),
        ([Tier.DEVICE, Tier.HOST], "storage"),
        ([], "device"),
        ([Tier.DEVICE], "host"),
    ):
        forget(*tiers)
        found = hit(tier)
        for name, content in expected.items():
            np.testing.assert_array_equal(found[name], content, err_msg=f"{name}, {tier} hit")
    world.settle()
    world.idle()
