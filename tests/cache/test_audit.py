"""The audit finds what it is for: a slot lost, owned twice or used though free, and pins without a reason."""

import numpy as np
import pytest

from hicache.errors import InvariantError
from hicache.tree import Pin
from hicache.units import HOLE, DeviceSlots, HostSlots, Tier
from tests.hand import HandExecutor
from tests.world import MODELS, PAGE, World, tokens

PROMPT = tokens(*range(4 * PAGE + 1))


@pytest.fixture(params=sorted(MODELS))
def world(request) -> World:
    world = World(MODELS[request.param], executor=HandExecutor())
    world.serve(PROMPT)
    world.executor.settle(world.cache.poll)
    world.cache.audit()
    return world


def cached_slot(world: World, tier: Tier, pool: str = "kv") -> np.ndarray:
    return world.cache.controller.state.tree.resident(pool, tier)[:1]


def test_a_device_slot_that_is_freed_while_it_is_cached(world: World):
    world.cache._device_allocators["kv"].free(cached_slot(world, Tier.DEVICE))
    with pytest.raises(InvariantError, match=r"pool 'kv', device: .* owned though free: \[0\]"):
        world.cache.audit()


def test_a_host_slot_that_is_freed_while_it_is_cached(world: World):
    world.cache.controller.state.group.free(HostSlots(cached_slot(world, Tier.HOST)))
    with pytest.raises(InvariantError, match=r"pool 'kv', host: .* owned though free: \[0\]"):
        world.cache.audit()


def test_a_slot_that_is_freed_and_handed_out_again_has_two_owners(world):
    slot = cached_slot(world, Tier.DEVICE)
    allocator = world.cache._device_allocators["kv"]
    free = allocator.alloc(allocator.available)
    allocator.free(slot)
    match = world.cache.match_prefix(tokens(1), world.namespace)
    lent = allocator.alloc(1)
    allocator.free(free)
    match._lent.add({"kv": lent}, 1, 0)
    with pytest.raises(InvariantError, match=r"owned twice: \[0\]"):
        world.cache.audit()


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_a_slot_that_nobody_has(world: World, tier: Tier):
    reservation = world.cache.controller.state.group.reserve({"kv": 2}, tier)
    reservation.commit()
    with pytest.raises(InvariantError, match=rf"'kv', {tier.value}: 6 slots are taken, .* owned by nobody: \[. .\]"):
        world.cache.audit()


def test_a_lent_slot_that_a_request_forgets(world: World):
    match = world.cache.match_prefix(tokens(1), world.namespace)
    assert world.allocate(match, 2 * PAGE)
    world.cache.audit()
    match._lent.take_pages(1)
    with pytest.raises(InvariantError, match="owned by nobody"):
        world.cache.audit()


@pytest.mark.parametrize("forget", ["live", "snapshot"])
def test_a_state_that_a_request_forgets(forget):
    world = World(MODELS["three"])
    match = world.cache.match_prefix(tokens(1), world.namespace)
    assert world.allocate(match, 2 * PAGE)
    assert len(match.lent["state"]) == 2
    world.cache.audit()
    if forget == "live":
        match._lent.live.clear()
    else:
        match._lent.take_snapshots()
    with pytest.raises(InvariantError, match=r"pool 'state', device: .* owned by nobody"):
        world.cache.audit()


def test_slots_of_every_pool_are_counted():
    for pool in ("swa", "state"):
        world = World(MODELS["three"])
        world.cache._device_allocators[pool].alloc(1)
        with pytest.raises(InvariantError, match=f"pool '{pool}', device"):
            world.cache.audit()


def test_a_derived_pool_with_slots_of_its_own():
    world = World(MODELS["derived"])
    world.cache.controller.mem_pool_host.get_pool("indexer").alloc(1)
    with pytest.raises(InvariantError, match="indexer"):
        world.cache.audit()


def test_a_pin_that_nobody_gives_back(world: World):
    tree = world.cache.controller.state.tree
    match = world.cache.match_prefix(PROMPT, world.namespace)
    found = tree.match(world.namespace.fingerprint, PROMPT)
    tree.pin(found, Pin.HERE, 2)
    world.cache.audit()
    world.cache.release(match)
    with pytest.raises(InvariantError, match="nothing is open or in flight, but 1 pins are held"):
        world.cache.audit()


def test_a_transfer_whose_slots_are_used_by_others(world: World):
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    world.cache.load_back(match)
    world.cache.audit()
    slots = match.slots()
    assert not np.any(slots == HOLE)
    world.cache._device_allocators["kv"].free(DeviceSlots(slots[:1]))
    with pytest.raises(InvariantError, match="owned though free"):
        world.cache.audit()


def test_a_tree_that_miscounts(world: World):
    core = world.cache.controller.state.tree._core
    core.accounts.shared.free[0] += 1
    with pytest.raises(InvariantError):
        world.cache.audit()
