"""A pool that joins a built cache is known to every part of it, as if it had been there from the start, or to none."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hicache.coverage import Coverage, Full
from hicache.errors import ConfigError
from hicache.pools import HostPoolGroup, PoolEntry, SlotAllocator
from hicache.units import PoolName

_FULL = Full()


@dataclass(frozen=True, slots=True)
class SidecarPoolSpec:
    """What a pool is to the cache. Where it lies is said by the `PoolEntry` that comes with it.

    With `indices_from_pool` it lives at that pool's slots, is there exactly when that one is, and has its coverage.
    Otherwise it has slots of its own; the first `reserved_slots` on the device are never handed out.
    """

    name: PoolName
    coverage: Coverage = _FULL
    indices_from_pool: PoolName | None = None
    reserved_slots: int = 0


@dataclass(frozen=True, slots=True)
class Sidecars:
    """Entries that are ready to join a group, and the allocators of those with device slots of their own."""

    entries: tuple[PoolEntry, ...]
    allocators: Mapping[PoolName, SlotAllocator]


def prepare(group: HostPoolGroup, pools: Iterable[tuple[SidecarPoolSpec, PoolEntry]]) -> Sidecars:
    """Checks spec against entry. Raises ConfigError, naming the pool; what a group refuses is left to the group."""
    entries: list[PoolEntry] = []
    allocators: dict[PoolName, SlotAllocator] = {}
    for spec, entry in pools:
        _check(spec, entry)
        entry = replace(entry, coverage=spec.coverage, derived_from=spec.indices_from_pool)
        if spec.indices_from_pool is None:
            allocators[spec.name] = _allocator(spec, entry)
            entry = entry.with_device_allocator(allocators[spec.name])
        else:
            _check_source(spec, (*group.entries, *entries))
        entries.append(entry)
    return Sidecars(tuple(entries), allocators)


def require_no_requests(pools: Iterable[PoolEntry], open_matches: int) -> None:
    """Raises ConfigError, naming the first pool, when a request is open: it was planned without the pool."""
    for entry in pools:
        if open_matches:
            raise ConfigError(
                f"pool {entry.name!r} comes too late: {open_matches} matches are open;"
                " register every pool before the first request"
            )


def _check(spec: SidecarPoolSpec, entry: PoolEntry) -> None:
    if entry.name != spec.name:
        raise ConfigError(f"the spec is of pool {spec.name!r}, the entry of {entry.name!r}; give both one name")
    if entry.coverage not in (_FULL, spec.coverage):
        raise ConfigError(
            f"pool {spec.name!r}: the spec says {spec.coverage}, the entry {entry.coverage}; leave it out of the entry"
        )
    if entry.derived_from not in (None, spec.indices_from_pool):
        raise ConfigError(
            f"pool {spec.name!r}: the spec says indices_from_pool={spec.indices_from_pool!r}, the entry"
            f" derived_from={entry.derived_from!r}; leave it out of the entry"
        )
    if entry.is_primary_index_anchor:
        raise ConfigError(f"pool {spec.name!r} joins as a sidecar, so it can't be the anchor; build the cache with it")
    if entry.device_alloc_fn is not None:
        raise ConfigError(
            f"pool {spec.name!r}: its device slots are handed out by the cache; leave device_alloc_fn, device_free_fn"
            " and device_available_fn out"
        )


def _check_source(spec: SidecarPoolSpec, entries: Iterable[PoolEntry]) -> None:
    source = next((entry for entry in entries if entry.name == spec.indices_from_pool), None)
    if source is not None and source.coverage != spec.coverage:
        raise ConfigError(
            f"pool {spec.name!r} lives at the slots of {source.name!r}, so it is there when that is: its coverage is"
            f" {source.coverage}, not {spec.coverage}"
        )
    if spec.reserved_slots:
        raise ConfigError(
            f"pool {spec.name!r} has reserved_slots={spec.reserved_slots}, but lives at the slots of"
            f" {spec.indices_from_pool!r}, which reserves its own; leave it out"
        )


def _allocator(spec: SidecarPoolSpec, entry: PoolEntry) -> SlotAllocator:
    slots = entry.device_pool.slots
    if not 0 <= spec.reserved_slots < slots:
        raise ConfigError(
            f"pool {spec.name!r} has {slots} device slots and reserved_slots={spec.reserved_slots};"
            " reserve fewer, or give it more"
        )
    return SlotAllocator(slots, spec.reserved_slots)
