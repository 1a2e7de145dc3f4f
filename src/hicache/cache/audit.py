"""Every slot is free, cached, lent, retracted or in flight, exactly one of them; no pin is without a reason."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from hicache.cache.match import Match
from hicache.controller import HybridCacheController
from hicache.controller.dispatch import Retired
from hicache.controller.parcels import Stage
from hicache.controller.state import present
from hicache.errors import InvariantError
from hicache.pools import SlotAllocator
from hicache.units import Int32Array, PoolName, Tier


def audit(
    controller: HybridCacheController, device_allocators: Mapping[PoolName, SlotAllocator], matches: Iterable[Match]
) -> None:
    """Raises InvariantError, naming pool, tier and slots, at the first contradiction."""
    state = controller.state
    held = list(matches)
    state.tree.check()
    state.group.check()
    for pool in state.pools:
        allocator = device_allocators[pool]
        allocator.check()
        _check(pool, Tier.DEVICE, allocator.taken(), _device_owners(controller, pool, held))
        _check(pool, Tier.HOST, state.group.get_pool(pool).taken(), _host_owners(controller, pool))
    reasons = bool(held or state.deferred or controller.fetches.running) or len(state.dispatcher) > 0
    if state.tree.pins_total() and not reasons:
        raise InvariantError(f"nothing is open or in flight, but {state.tree.pins_total()} pins are held")


def _device_owners(
    controller: HybridCacheController, pool: PoolName, matches: Iterable[Match]
) -> Iterator[tuple[str, Int32Array]]:
    state = controller.state
    yield "cached", state.tree.resident(pool, Tier.DEVICE)
    held = list(matches)
    for match in held:
        yield "lent", present(_of(match.lent, pool))
    for retired in _retired(controller, held):
        yield "lent", present(_of(retired.slots, pool))
    for transfer in state.dispatcher.in_flight():
        yield "in flight", _of(transfer.device_slots, pool)
    for quarantined in state.quarantined:
        yield "in flight", quarantined.eviction.slots(pool, Tier.DEVICE)
    for parcel in controller.retractions.parcels:
        yield "in flight", _of(parcel.device, pool)


def _host_owners(controller: HybridCacheController, pool: PoolName) -> Iterator[tuple[str, Int32Array]]:
    state = controller.state
    yield "cached", state.tree.resident(pool, Tier.HOST)
    for transfer in state.dispatcher.in_flight():
        yield "in flight", _of(transfer.host_slots, pool)
    for quarantined in state.quarantined:
        yield "in flight", quarantined.eviction.slots(pool, Tier.HOST)
    for parcel in controller.retractions.parcels:
        yield "retracted" if parcel.stage is Stage.AWAY else "in flight", _of(parcel.host, pool)
    for parked in controller.fetches.parked_slots():
        yield "in flight", _of(parked, pool)


def _retired(controller: HybridCacheController, matches: Iterable[Match]) -> Iterable[Retired]:
    """Each once: several requests may hold the same."""
    holders = [*(match.retired for match in matches), *(one.retired for one in controller.state.deferred)]
    return {id(retired): retired for holder in holders for retired in holder}.values()


def _of(slots: Mapping[PoolName, Int32Array], pool: PoolName) -> Int32Array:
    return slots[pool] if pool in slots else np.empty(0, dtype=np.int32)


def _check(pool: PoolName, tier: Tier, taken: Int32Array, owners: Iterator[tuple[str, Int32Array]]) -> None:
    parts = list(owners)
    owned = np.sort(np.concatenate([slots for _, slots in parts]))
    if np.array_equal(owned, taken):
        return
    twice = owned[1:][owned[1:] == owned[:-1]]
    lost = np.setdiff1d(taken, owned)
    free = np.setdiff1d(owned, taken)
    counts = {what: sum(len(slots) for kind, slots in parts if kind == what) for what, _ in parts}
    raise InvariantError(
        f"pool {pool!r}, {tier.value}: {len(taken)} slots are taken, but {counts} are owned;"
        f" owned twice: {twice[:8]}, owned by nobody: {lost[:8]}, owned though free: {free[:8]}"
    )
