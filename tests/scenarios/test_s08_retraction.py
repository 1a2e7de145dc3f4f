"""S08: the host nearly full while requests leave and come back: neither a source nor a copy in flight is taken."""

import pytest

from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.transfer import Backup, Load
from hicache.units import Tier
from tests.cache.retracting import OTHER, all_is_given_back, empty_device, restored, running
from tests.hand import HandExecutor
from tests.world import KINDS, PAGE, World, tokens


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("host_pages", [6, 7, 8, 10])
@pytest.mark.parametrize("model", sorted(KINDS))
def test_pressure_does_not_take_what_is_away_or_on_its_way(model, host_pages, policy):
    world = World(KINDS[model], host_pages=host_pages, write_policy=policy)
    match = running(world)
    retracted = world.cache.retraction_backup(match)
    assert retracted is not None
    world.cache.evict(Tier.HOST)
    world.settle()
    for start in (1000, 2000, 3000):
        world.serve(tokens(*range(start, start + 4 * PAGE + 1)))
        world.settle()
        world.cache.evict(Tier.HOST)
        world.cache.audit()
    empty_device(world)
    assert restored(world, retracted) == match.length_tokens
    world.check(match)
    world.cache.release(match)
    all_is_given_back(world)


def test_making_room_to_come_back_takes_nothing_that_comes_back():
    hand = HandExecutor()
    world = World(executor=hand, device_pages=8, host_pages=8, write_policy="write_back")
    match = running(world)
    retracted = world.cache.retraction_backup(match)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    world.serve(OTHER)
    load = world.cache.retraction_restore(retracted)
    assert world.cache.evict(Tier.HOST) == 0, "all that is there is pinned or in flight"
    world.cache.audit()
    for _ in range(5):
        hand.run(Backup)
        world.cache.poll()
        load = load or world.cache.retraction_restore(retracted)
    world.cache.evict(Tier.DEVICE)
    hand.run(Load)
    assert load.result() == match.length_tokens
    world.check(match)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()


@pytest.mark.parametrize("model", sorted(KINDS))
@pytest.mark.parametrize("seed", range(4))
def test_requests_that_take_turns_are_right_whatever_settles_when(model, seed):
    rates = FaultRates(start=0.4, fail=0.03, partial=0.03)
    world = World(
        KINDS[model],
        executor=SimulatedExecutor(seed, rates),
        device_pages=12,
        host_pages=12 + seed,
        write_policy=("write_through", "write_back")[seed % 2],
    )
    lost = 0
    for turn in range(8):
        match = world.prefill((OTHER, tokens(*range(4 * PAGE + 1)))[turn % 2])
        retracted = world.cache.retraction_backup(match) if match in world.texts else None
        second = world.prefill(tokens(*range(5000 + turn, 5000 + turn + 3 * PAGE)))
        world.check(second)
        world.cache.release(second)
        if retracted is None:
            world.cache.release(match)
            continue
        if restored(world, retracted):
            world.check(match)
        else:
            lost += 1
        world.cache.release(match)
    assert world.cache.stats().counters["retraction_lost"] == lost
    all_is_given_back(world)
