"""S05: a slow copy of one request, and another that wants its pages: the copy never holds the other's bytes."""

import numpy as np
import pytest

from hicache.cache import Match
from hicache.storage.memory import MemoryBackend
from hicache.transfer import Backup, Load, Store
from hicache.units import Tier
from tests.cache.retracting import ANSWER, OTHER, count, running
from tests.hand import HandExecutor
from tests.world import KINDS, PAGE, World


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("model", sorted(KINDS))
def test_the_next_request_gets_no_slot_that_a_copy_still_reads(model, policy):
    hand = HandExecutor()
    world = World(KINDS[model], executor=hand, write_policy=policy, device_pages=8, backend=MemoryBackend())
    first = running(world)
    held = {pool: set(first.slots(pool).tolist()) - {-1} for pool in world.cache.controller.state.pools}
    for pool, slot in first.live_slots.items():
        held[pool].add(slot)
    retracted = world.cache.retraction_backup(first)
    second = world.cache.match_prefix(OTHER, world.namespace)
    if model != "state":
        assert world.cache.allocate(second, 8 * PAGE) is None, "nothing is free before the copy has settled"
    take_all(world, second)
    for pool, lent in second.lent.items():
        assert not held[pool] & set(lent.tolist())
    world.cache.audit()
    hand.run(Backup)
    world.cache.poll()
    assert retracted.settled
    assert not retracted.lost
    world.cache.release(second)
    hand.settle(world.cache.poll)
    second = world.prefill(OTHER)
    world.check(second)
    world.cache.release(second)
    hand.settle(world.cache.poll)
    load = world.cache.retraction_restore(retracted)
    for _ in range(20):
        if load is not None:
            break
        hand.settle(world.cache.poll)
        load = world.cache.retraction_restore(retracted)
    hand.run(Load)
    assert load.result() == first.length_tokens
    world.check(first)
    world.cache.release(first)
    hand.settle(world.cache.poll)
    world.idle()


@pytest.mark.parametrize("model", ["one", "three", "everything"])
def test_what_is_stored_under_the_first_requests_keys_is_its_own(model):
    """The slow copy runs last; then storage is asked, by a cache that starts empty."""
    hand, backend = HandExecutor(), Shelf()
    world = World(KINDS[model], executor=hand, device_pages=8, backend=backend)
    first = running(world)
    world.cache.retraction_discard(world.cache.retraction_backup(first))
    for _ in range(3):
        second = world.cache.match_prefix(OTHER, world.namespace)
        if world.cache.allocate(second, 2 * PAGE, checkpoint=True) is not None:
            world.compute(second, OTHER[: 8 * PAGE])
            world.cache.insert(second, OTHER[: 8 * PAGE])
        world.cache.release(second)
    hand.settle(world.cache.poll)
    assert not hand.of(Store)
    world.cache.close()
    later = World(KINDS[model], backend=backend)
    ticket = later.cache.prefetch(ANSWER, later.namespace)
    later.settle()
    match = later.prefill(ANSWER, ticket)
    assert match.cached_tokens["storage"] >= 4 * PAGE
    later.check(match)
    later.cache.release(match)
    later.settle()
    later.idle()


def take_all(world: World, match: Match) -> None:
    """Every slot that can be had, with other bytes in it: what is computed is of no use to anyone."""
    for page in range(1, 9):
        if world.cache.allocate(match, PAGE, checkpoint=True) is None:
            return
        world.compute(match, (OTHER + ANSWER)[: 4 * PAGE * page])


class Shelf(MemoryBackend):
    """Outlives the cache."""

    def close(self) -> None:
        """Keeps everything."""


def test_a_request_that_is_aborted_while_it_leaves_frees_its_slots_last():
    hand = HandExecutor()
    world = World(executor=hand)
    first = running(world)
    hand.settle(world.cache.poll)
    slots = set(np.concatenate(list(first.lent.values())).tolist())
    retracted = world.cache.retraction_backup(first)
    world.cache.retraction_discard(retracted)
    other = world.cache.match_prefix(OTHER, world.namespace)
    assert world.cache.allocate(other, 10 * PAGE) is not None
    assert not slots & set(other.lent["kv"].tolist())
    hand.settle(world.cache.poll)
    assert count(world, "lost") == 0
    world.cache.release(other)
    hand.settle(world.cache.poll)
    world.idle()
    assert world.free_and_evictable(Tier.DEVICE) == world.device_pages
