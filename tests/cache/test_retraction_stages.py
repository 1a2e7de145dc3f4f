"""A request that is away can be given up at any stage, and a cache can be closed: everything is given back."""

import pytest

from hicache.cache import Retracted
from hicache.testing.streams import VirtualEvent
from hicache.units import Tier
from tests.cache.retracting import (
    all_is_given_back,
    away,
    running,
)
from tests.hand import HandExecutor
from tests.world import KINDS, PAGE, THREE_POOLS, World


def leaving(world: World) -> Retracted:
    return away(world, running(world))


def on_host(world: World) -> Retracted:
    retracted = leaving(world)
    world.executor.settle(world.cache.poll)
    return retracted


def loading(world: World) -> Retracted:
    retracted = on_host(world)
    world.cache.evict(Tier.DEVICE)
    assert world.cache.retraction_restore(retracted) is not None
    return retracted


def loading_and_lent(world: World) -> Retracted:
    retracted = loading(world)
    assert world.allocate(retracted.match, PAGE)
    return retracted


def back(world: World) -> Retracted:
    retracted = loading(world)
    world.executor.settle(world.cache.poll)
    return retracted


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", [leaving, on_host, loading, loading_and_lent, back])
@pytest.mark.parametrize("model", sorted(KINDS))
def test_an_abort_at_any_stage_gives_everything_back(model, stage, late):
    world = World(KINDS[model], executor=HandExecutor(), write_policy="write_back")
    retracted = stage(world)
    event = VirtualEvent() if late else None
    world.cache.retraction_discard(retracted, event)
    world.cache.audit()
    world.executor.settle(world.cache.poll)
    world.cache.audit()
    if event is not None:
        event.passed = True
    world.executor.settle(world.cache.poll)
    all_is_given_back(world)


@pytest.mark.parametrize("stage", [leaving, on_host, loading, back])
def test_a_cache_closes_at_any_stage(stage):
    world = World(THREE_POOLS, executor=HandExecutor())
    stage(world)
    world.cache.close()
