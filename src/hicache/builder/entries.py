"""A pool gets memory on both tiers of one geometry, or gives back what it took."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeAlias

from hicache.builder.describe import PoolDescription
from hicache.layout import PackedLayout, PoolGeometry
from hicache.memory import ArenaKind
from hicache.pools import DevicePool, HostPool, PoolCapabilities, PoolEntry

DevicePoolFactory: TypeAlias = Callable[[str, PoolGeometry, int], DevicePool]
"""Makes the memory of a device pool: name, geometry, slots (reserved ones included)."""

_CAPABILITIES = PoolCapabilities(staged_write_back=False, zero_copy_storage=True)


def make_entry(
    pool: PoolDescription, device_pool: DevicePoolFactory, device_slots: int, host_slots: int, arena: ArenaKind
) -> PoolEntry:
    """The pool with memory of its own, packed drafts included. Whoever has the entry closes its host pool.

    Raises ConfigError when there isn't the memory.
    """
    with ExitStack() as undo:
        layout = PackedLayout(pool.geometry, pool.packed_drafts)
        host_pool = HostPool.allocate(pool.name, layout, host_slots, _CAPABILITIES, arena)
        undo.callback(host_pool.close)
        entry = PoolEntry(
            name=pool.name,
            host_pool=host_pool,
            device_pool=device_pool(pool.name, pool.geometry, device_slots),
            layer_mapper=pool.map_layer,
            coverage=pool.coverage,
            derived_from=pool.derived_from,
            replicated=pool.replicated,
            packed_draft_device_pools=tuple(
                device_pool(f"{pool.name}.draft{index}", draft, device_slots)
                for index, draft in enumerate(pool.packed_drafts)
            ),
        )
        undo.pop_all()
    return entry
