"""What a pool must satisfy to join a group: refused by name here, or it works with every other part."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hicache.coverage import Checkpoint, Full, Window
from hicache.errors import ConfigError
from hicache.pools.entry import PoolEntry
from hicache.pools.host import PoolCapabilities
from hicache.units import PoolName


@dataclass(frozen=True, slots=True)
class GroupCapabilities:
    """What every pool of a group supports."""

    staged_write_back: bool
    zero_copy_storage: bool


def combined_capabilities(entries: Iterable[PoolEntry]) -> GroupCapabilities:
    """What all entries support; nothing when there are none."""
    declared = [entry.host_pool.capabilities for entry in entries]
    return GroupCapabilities(
        staged_write_back=bool(declared) and all(each.staged_write_back is True for each in declared),
        zero_copy_storage=bool(declared) and all(each.zero_copy_storage is True for each in declared),
    )


def first_uses(entry: PoolEntry, layer_count: int) -> tuple[int | None, ...]:
    """For each model layer, the layer of this pool that has to be there from then on, or None when it needs no new one.

    A pool layer that several model layers use is named for the first of them.
    """
    mapped = [entry.layer_mapper(layer) for layer in range(layer_count)]
    return tuple(own if own not in mapped[:layer] else None for layer, own in enumerate(mapped))


def check_entry(entry: PoolEntry, others: Mapping[PoolName, PoolEntry], layer_count: int) -> None:
    """Raises ConfigError, naming the pool and what to change, when `entry` can't join `others`."""
    if entry.name in others:
        raise ConfigError(f"pool {entry.name!r} is registered already; give each pool a name of its own")
    shared = [other.name for other in others.values() if other.host_pool is entry.host_pool]
    if shared:
        raise ConfigError(f"pools {entry.name!r} and {shared[0]!r} have one host pool; give each a pool of its own")
    _check_anchor(entry, others)
    _check_functions(entry)
    _check_coverage(entry)
    _check_capabilities(entry)
    _check_layout(entry)
    _check_layers(entry, layer_count)
    if entry.derived_from is not None:
        _check_derived(entry, entry.derived_from, others)
    if len(entry.host_pool.taken()):
        raise ConfigError(f"host pool of {entry.name!r} has slots in use; register it before it hands any out")


def _check_anchor(entry: PoolEntry, others: Mapping[PoolName, PoolEntry]) -> None:
    marked = [other.name for other in others.values() if other.is_primary_index_anchor]
    if entry.is_primary_index_anchor and marked:
        raise ConfigError(f"pools {marked[0]!r} and {entry.name!r} are both marked as anchor; mark one")


def _check_functions(entry: PoolEntry) -> None:
    for tier, evict, evictable in (
        ("host", entry.host_evict_fn, entry.host_evictable_fn),
        ("device", entry.device_evict_fn, entry.device_evictable_fn),
    ):
        if (evict is None) != (evictable is None):
            raise ConfigError(
                f"pool {entry.name!r} has only one of {tier}_evict_fn and {tier}_evictable_fn; give both or neither"
            )
    device = (entry.device_alloc_fn, entry.device_free_fn, entry.device_available_fn)
    if any(function is None for function in device) and any(function is not None for function in device):
        raise ConfigError(
            f"pool {entry.name!r} has some of device_alloc_fn, device_free_fn and device_available_fn;"
            " give all three or none"
        )


def _check_coverage(entry: PoolEntry) -> None:
    coverage: object = entry.coverage
    if not isinstance(coverage, Full | Window | Checkpoint):
        raise ConfigError(
            f"pool {entry.name!r} has the coverage {coverage!r}, which is not known; use Full, Window or Checkpoint"
        )


def _check_capabilities(entry: PoolEntry) -> None:
    declared: PoolCapabilities = entry.host_pool.capabilities
    values = {"staged_write_back": declared.staged_write_back, "zero_copy_storage": declared.zero_copy_storage}
    undeclared = [name for name, value in values.items() if value is None]
    if undeclared:
        raise ConfigError(f"pool {entry.name!r} does not declare {' and '.join(undeclared)}; say True or False")


def _check_layout(entry: PoolEntry) -> None:
    layout = entry.host_pool.layout
    if layout.own != entry.device_pool.geometry:
        raise ConfigError(
            f"pool {entry.name!r} has another geometry on the device than in its host page; give both one"
        )
    drafts = entry.packed_draft_device_pools
    if layout.drafts != tuple(draft.geometry for draft in drafts):
        raise ConfigError(
            f"pool {entry.name!r} packs {len(layout.drafts)} drafts in its host page, and {len(drafts)} draft device"
            " pools don't match them in number, order and geometry; give one per packed draft"
        )
    for draft in drafts:
        if draft.slots < entry.device_pool.slots:
            raise ConfigError(
                f"packed draft {draft.name!r} has {draft.slots} device slots, its owner {entry.name!r}"
                f" {entry.device_pool.slots}; it lives at the owner's slots, give it as many"
            )


def _check_layers(entry: PoolEntry, layer_count: int) -> None:
    there = len(entry.device_pool.geometry.layers)
    reached = sorted(own for own in first_uses(entry, layer_count) if own is not None)
    if reached != list(range(there)):
        raise ConfigError(
            f"the layer mapper of pool {entry.name!r} reaches its layers {reached} over {layer_count} model"
            f" layers; it must reach each of its {there} layers"
        )


def _check_derived(entry: PoolEntry, source: PoolName, others: Mapping[PoolName, PoolEntry]) -> None:
    if source not in others:
        raise ConfigError(
            f"pool {entry.name!r} lives at the slots of {source!r}, which is not registered; register {source!r} first"
        )
    if others[source].derived_from is not None:
        raise ConfigError(
            f"pool {entry.name!r} lives at the slots of {source!r}, which is derived itself;"
            f" name {others[source].derived_from!r} instead"
        )
    if entry.is_primary_index_anchor:
        raise ConfigError(f"pool {entry.name!r} is derived, so it can't be the anchor; mark {source!r}")
    functions = (entry.host_evict_fn, entry.device_evict_fn, entry.device_alloc_fn)
    if any(function is not None for function in functions):
        raise ConfigError(
            f"pool {entry.name!r} is derived: it takes and evicts nothing itself; give those to {source!r}"
        )
    for tier, own, needed in (
        ("host", entry.host_pool.slots, others[source].host_pool.slots),
        ("device", entry.device_pool.slots, others[source].device_pool.slots),
    ):
        if own < needed:
            raise ConfigError(
                f"pool {entry.name!r} has {own} {tier} slots, its source {source!r} {needed}; give it as many"
            )
