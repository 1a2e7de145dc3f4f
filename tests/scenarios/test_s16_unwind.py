"""S16: what fails half way is undone in full: free + evictable + held is every pool's size, and no mark is false."""

from contextlib import contextmanager

import pytest

from hicache.storage.memory import MemoryBackend
from hicache.transfer import Backup, Load
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import MODELS, PAGE, THREE_POOLS, World, tokens

PROMPT = tokens(*range(4 * PAGE + 1))
OTHER = tokens(*range(1000, 1000 + 4 * PAGE + 1))


def sums(world: World) -> dict[tuple[str, Tier], tuple[int, int]]:
    """Per pool and tier: free and cached slots. What is neither is lent or in flight."""
    return {(pool.pool, pool.tier): (pool.free, pool.cached) for pool in world.cache.stats().pools}


def everything_can_be_had(world: World) -> None:
    state = world.cache.controller.state
    for pool in world.cache.stats().pools:
        assert state.room(pool.pool, pool.tier) == pool.slots, pool


@contextmanager
def taken(world: World, pool: str, tier: Tier, left: int):
    """All slots of a pool but `left` are in somebody else's hands."""
    group = world.cache.controller.mem_pool_host
    free = world.cache.controller.state.available(pool, tier)
    reservation = group.reserve({pool: free - left}, tier)
    yield
    reservation.cancel()


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_backup_that_finds_the_host_locked_leaves_no_mark(model):
    hand = HandExecutor()
    world = World(
        MODELS[model],
        executor=hand,
        device_pages=6,
        host_pages=4,
        write_policy="write_back",
        backend=MemoryBackend(),
    )
    world.serve(PROMPT)
    world.cache.evict(Tier.DEVICE)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    holder = world.cache.match_prefix(PROMPT, world.namespace)
    world.serve(OTHER)
    world.cache.audit()
    hosts = {place: counts for place, counts in sums(world).items() if place[1] is Tier.HOST}
    assert world.cache.evict(Tier.DEVICE) == 4
    assert not hand.of(Backup)
    after = sums(world)
    assert {place: after[place] for place in hosts} == hosts, "nothing is said to be backed up"
    assert world.cached(OTHER) == (0, 0)
    assert world.cache.stats().counters["dropped_pages"] == 4
    world.cache.release(holder)
    hand.settle(world.cache.poll)
    world.idle()
    everything_can_be_had(world)


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("bad", [{"kv": [0]}, {"kv": [3]}, {}])
def test_a_backup_that_fails_leaves_no_mark(model, bad):
    pool = MODELS[model].pools[-1].name
    hand = HandExecutor()
    world = World(MODELS[model], executor=hand, write_policy="write_back", backend=MemoryBackend())
    world.serve(PROMPT)
    world.cache.evict(Tier.DEVICE)
    hand.run(Backup, bad=bad or {pool: [0, 1, 2, 3]})
    world.cache.poll()
    world.cache.audit()
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    match = world.prefill(PROMPT)
    world.check(match)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()
    everything_can_be_had(world)


@pytest.mark.parametrize("short", ["kv", "swa", "state"])
def test_a_load_that_gets_slots_in_some_pools_only_gets_none(short):
    hand = HandExecutor()
    world = World(THREE_POOLS, executor=hand)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    state = world.cache.controller.state
    for pool in ("swa", "state"):
        state.free_eviction(state.tree.evict(pool, Tier.DEVICE, 100, drop_dirty=False))
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert match.host_tokens == 4 * PAGE
    with taken(world, short, Tier.DEVICE, left=0):
        before = sums(world)
        load = world.cache.load_back(match)
        assert sums(world) == before
        assert load.result() == 0
    assert not hand.of(Load)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()
    everything_can_be_had(world)
    world.serve(PROMPT)


@pytest.mark.parametrize("at", ["submitted", "done"])
def test_a_load_that_is_aborted_after_its_state_slot_was_taken(at):
    hand = HandExecutor()
    world = World(THREE_POOLS, executor=hand)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    state = world.cache.controller.state
    state.free_eviction(state.tree.evict("state", Tier.DEVICE, 100, drop_dirty=False))
    match = world.cache.match_prefix(PROMPT, world.namespace)
    world.cache.load_back(match)
    assert world.cache.allocate(match, 1)
    if at == "done":
        hand.run(Load, bad={"state": [0]})
    world.cache.release(match)
    world.cache.audit()
    hand.settle(world.cache.poll)
    world.idle()
    everything_can_be_had(world)
    again = world.prefill(PROMPT)
    world.check(again)
    world.cache.release(again)
    hand.settle(world.cache.poll)
    world.idle()


@pytest.mark.parametrize("short", ["kv", "swa", "state"])
def test_an_admission_that_fails_in_one_pool_takes_nothing_in_the_others(short):
    hand = HandExecutor()
    world = World(THREE_POOLS, executor=hand)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    match = world.cache.match_prefix(OTHER, world.namespace)
    with taken(world, short, Tier.DEVICE, left=0):
        held = world.cache.match_prefix(PROMPT, world.namespace)
        before = sums(world)
        assert world.cache.allocate(match, 8 * PAGE) is None
        assert sums(world) == before
        assert match.page_count == 0
        world.cache.release(held)
    assert world.allocate(match, 4 * PAGE + 1)
    world.compute(match, OTHER)
    world.cache.release(world.cache.insert(match, OTHER))
    hand.settle(world.cache.poll)
    world.idle()
    everything_can_be_had(world)
