"""S16: leaving or coming back fails in one pool after others were taken: all pools are as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hicache.units import Tier
from tests.cache.retracting import all_is_given_back, away, count, pools, restored, running
from tests.world import KINDS, World


def sums(world: World) -> dict[tuple[str, Tier], tuple[int, int, int]]:
    return {(pool.pool, pool.tier): (pool.free, pool.cached, pool.other) for pool in world.cache.stats().pools}


@contextmanager
def taken(world: World, pool: str, tier: Tier) -> Iterator[None]:
    """All slots of a pool are in somebody else's hands."""
    state = world.cache.controller.state
    reservation = state.group.reserve({pool: state.available(pool, tier)}, tier)
    yield
    reservation.cancel()


def cases() -> list[tuple[str, str]]:
    return [
        (name, pool.name)
        for name in ("one", "three", "state", "window and state", "everything")
        for pool in KINDS[name].pools
        if pool.derived_from is None
    ]


@pytest.mark.parametrize(("model", "short"), cases())
def test_leaving_takes_a_slot_of_every_pool_or_of_none(model, short):
    world = World(KINDS[model], host_pages=8, write_policy="write_back")
    match = running(world)
    with taken(world, short, Tier.HOST):
        before = sums(world), world.cache.stats().pins
        assert world.cache.retraction_backup(match) is None
        assert (sums(world), world.cache.stats().pins) == before
    assert count(world, "refused") == 1
    world.check(match)
    retracted = away(world, match)
    assert restored(world, retracted) == match.length_tokens
    world.check(match)
    world.cache.release(match)
    all_is_given_back(world)


@pytest.mark.parametrize(("model", "short"), cases())
def test_coming_back_takes_a_slot_of_every_pool_or_of_none(model, short):
    world = World(KINDS[model])
    match = running(world)
    retracted = away(world, match)
    world.settle()
    world.cache.evict(Tier.DEVICE)
    assert set(pools(world)) >= {short}
    with taken(world, short, Tier.DEVICE):
        before = sums(world), world.cache.stats().pins
        assert world.cache.retraction_restore(retracted) is None
        assert (sums(world), world.cache.stats().pins) == before
    assert restored(world, retracted) == match.length_tokens
    world.check(match)
    world.cache.release(match)
    all_is_given_back(world)
