"""A draft's pools join its target's group by one declaration, all or none, or it is said why they can't."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from hicache.builder.describe import ModelConfig, ModelDescription, PoolDescription, describe_model
from hicache.builder.entries import DevicePoolFactory, make_entry
from hicache.cache import SidecarPoolSpec, UnifiedRadixCache
from hicache.coverage import Checkpoint, Full
from hicache.device.array import ArrayDevicePool
from hicache.errors import ConfigError
from hicache.memory import ArenaKind, require_memory
from hicache.pools import PoolEntry
from hicache.units import PoolName

DRAFT_POOL = "draft"
"""What the pool of a draft model is called by default."""

_FULL = Full()


@dataclass(frozen=True, slots=True)
class SidecarMemory:
    """How memory for a pool that joins later is made; the defaults are those of `build_kv_cache`.

    `reserved_slots`: the first device slots of a pool with slots of its own, which are never handed out.
    """

    device_pool: DevicePoolFactory = ArrayDevicePool.page_first
    device_in_host_memory: bool = True
    host_arena: ArenaKind = ArenaKind.PLAIN
    reserved_slots: int = 0


_MEMORY = SidecarMemory()


def make_sidecar(
    cache: UnifiedRadixCache, pool: PoolDescription, memory: SidecarMemory = _MEMORY
) -> tuple[SidecarPoolSpec, PoolEntry]:
    """A pool for `cache.register_sidecar_pool`, sized as the group: `cache.register_sidecar_pool(*make_sidecar(...))`.

    A derived pool gets the slots and the coverage of its source. One with slots of its own gets as many as the largest
    pool of its kind: snapshots as others with snapshots, pages as others of that coverage, else as any with pages. The
    memory comes on top of `device_size` and `host_size`. Raises ConfigError when it isn't there, or the group has no
    pool of that kind.
    """
    entries = cache.controller.mem_pool_host.entries
    like = _source(entries, pool) if pool.derived_from is not None else _alike(entries, pool)
    device_slots = max(entry.device_pool.slots for entry in like)
    host_slots = max(entry.host_pool.slots for entry in like)
    counted = host_slots + (device_slots if memory.device_in_host_memory else 0)
    require_memory(pool.slot_bytes * counted, f"pool {pool.name!r}")
    if pool.derived_from is not None:
        pool = replace(pool, coverage=like[0].coverage)
    reserved = 0 if pool.derived_from is not None else memory.reserved_slots
    spec = SidecarPoolSpec(pool.name, pool.coverage, pool.derived_from, reserved)
    return spec, make_entry(pool, memory.device_pool, device_slots, host_slots, memory.host_arena)


def maybe_register_hicache_draft(
    cache: object,
    draft: ModelConfig | None,
    *,
    name: PoolName = DRAFT_POOL,
    dtype: str | None = None,
    memory: SidecarMemory = _MEMORY,
) -> bool:
    """Register the pools of a draft model with its target's cache, before the first request. False without a draft.

    They are derived from the anchor; where that has no full coverage, from the first pool that has. Where none has,
    the draft gets slots of its own, as many as the largest pool of pages. A draft of one pool calls it `name`, one of
    several `name_pool`. The name stands for the draft's weights: caches that share a store and have other drafts must
    give them other names.

    Raises NotImplementedError for a cache that is not a `UnifiedRadixCache`, and ConfigError, with nothing registered,
    for a draft that keeps snapshots, has more layers than its target, looks further ahead than the cache was built
    for, or finds no pool of pages to be sized after.
    """
    if draft is None:
        return False
    if not isinstance(cache, UnifiedRadixCache):
        raise NotImplementedError(
            f"a draft's pools join a UnifiedRadixCache, not a {type(cache).__name__}; build the cache with"
            " build_kv_cache, or give what you have a pool of its own for the draft"
        )
    model = describe_model(draft, cache.page_size, dtype)
    group = cache.controller.mem_pool_host
    own = {entry.name: entry.coverage for entry in group.entries if entry.derived_from is None}
    source = next((pool for pool, coverage in own.items() if isinstance(coverage, Full)), None)
    lookahead = cache.controller.state.tree.lookahead_tokens
    if model.draft_lookahead > lookahead:
        raise ConfigError(
            f"the draft has draft_lookahead={model.draft_lookahead}, and this cache was built with {lookahead};"
            " set draft_lookahead in the description that build_kv_cache gets"
        )
    pools = _draft_pools(model, name, source, group.layer_count)
    with ExitStack() as undo:
        made = []
        for pool in pools:
            if pool.derived_from is None or pool.derived_from in own:
                made.append(make_sidecar(cache, pool, memory))
            else:
                made.append(_like(made[0], pool, memory))
            undo.callback(made[-1][1].host_pool.close)
        cache.register_hicache_draft_pools(made)
        undo.pop_all()
    return True


def with_draft(model: ModelDescription, draft: ModelDescription, name: PoolName = DRAFT_POOL) -> ModelDescription:
    """The target with its draft's pools, for `build_kv_cache`: sizes are split with them, pages are named with them.

    Raises ConfigError as `maybe_register_hicache_draft` does.
    """
    own = [pool for pool in model.pools if pool.derived_from is None]
    source = next((pool.name for pool in own if isinstance(pool.coverage, Full)), None)
    pools = _draft_pools(draft, name, source, model.layer_count)
    return replace(
        model, pools=(*model.pools, *pools), draft_lookahead=max(model.draft_lookahead, draft.draft_lookahead)
    )


def _draft_pools(
    draft: ModelDescription, name: PoolName, source: PoolName | None, layer_count: int
) -> tuple[PoolDescription, ...]:
    """The draft's pools as they join the target's: at the slots of `source`, else the first at its own."""
    names = {pool.name: name if len(draft.pools) == 1 else f"{name}_{pool.name}" for pool in draft.pools}
    deepest = max(layer for pool in draft.pools for layer in pool.layers)
    if deepest >= layer_count:
        raise ConfigError(
            f"the draft has {deepest + 1} layers, its target {layer_count}; a draft in pools of its own has no more"
            " layers than its target: pack it (packed_drafts), which takes any depth"
        )
    joined: list[PoolDescription] = []
    for pool in draft.pools:
        if isinstance(pool.coverage, Checkpoint):
            raise ConfigError(
                f"the draft's pool {pool.name!r} keeps snapshots of recurrent state, which don't lie at pages;"
                " use a draft with attention only"
            )
        first = joined[0].name if joined else None
        joined.append(
            replace(pool, name=names[pool.name], coverage=_FULL, chunk_tokens=None, derived_from=source or first)
        )
    return tuple(joined)


def _like(
    first: tuple[SidecarPoolSpec, PoolEntry], pool: PoolDescription, memory: SidecarMemory
) -> tuple[SidecarPoolSpec, PoolEntry]:
    """A pool at the slots of one that is about to join as well."""
    entry = first[1]
    made = make_entry(pool, memory.device_pool, entry.device_pool.slots, entry.host_pool.slots, memory.host_arena)
    return SidecarPoolSpec(pool.name, first[0].coverage, pool.derived_from), made


def _source(entries: Iterable[PoolEntry], pool: PoolDescription) -> list[PoolEntry]:
    found = [entry for entry in entries if entry.name == pool.derived_from]
    if not found:
        raise ConfigError(
            f"pool {pool.name!r} is derived from {pool.derived_from!r}, which is not registered;"
            f" there are {[entry.name for entry in entries]}"
        )
    return found


def _alike(entries: Iterable[PoolEntry], pool: PoolDescription) -> list[PoolEntry]:
    own = [entry for entry in entries if entry.derived_from is None]
    alike = [entry for entry in own if type(entry.coverage) is type(pool.coverage)]
    if not alike and not isinstance(pool.coverage, Checkpoint):
        alike = [entry for entry in own if not isinstance(entry.coverage, Checkpoint)]
    if not alike:
        kind = "snapshots" if isinstance(pool.coverage, Checkpoint) else "pages"
        raise ConfigError(
            f"pool {pool.name!r} holds {kind}, and no pool of this cache does that it could be sized after; describe it"
            " in the model that build_kv_cache gets"
        )
    return alike
