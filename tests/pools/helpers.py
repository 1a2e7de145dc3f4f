"""Small groups to test with: pools of a few slots, whose device side is a slot allocator over numpy memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hicache.device.array import ArrayDevicePool
from hicache.layout import PackedLayout, PoolGeometry, TensorSpec
from hicache.pools import HostPool, HostPoolGroup, PoolCapabilities, PoolEntry, SlotAllocator
from hicache.units import DeviceSlots, HostSlots

LAYERS = 3
ALL = PoolCapabilities(staged_write_back=True, zero_copy_storage=True)
KV = PoolGeometry.uniform(LAYERS, [TensorSpec("k", (2, 4), "float32"), TensorSpec("v", (2, 4), "float32")], 4)
ODD = PoolGeometry.uniform(LAYERS, [TensorSpec("index", (3,), "uint8"), TensorSpec("scale", (), "uint8")], 1)
DRAFT = PoolGeometry.uniform(2, [TensorSpec("k", (2, 4), "float16")], 4)


def host_slots(*slots: int) -> HostSlots:
    return HostSlots(np.array(slots, np.int32))


def device_slots(*slots: int) -> DeviceSlots:
    return DeviceSlots(np.array(slots, np.int32))


def identity(layer: int) -> int | None:
    return layer


def entry(
    name: str,
    *,
    slots: int = 8,
    device_slots: int = 8,
    geometry: PoolGeometry = KV,
    drafts: Sequence[PoolGeometry] = (),
    capabilities: PoolCapabilities = ALL,
    derived_from: str | None = None,
    anchor: bool = False,
    mapper: Callable[[int], int | None] = identity,
) -> PoolEntry:
    """An entry with memory of its own on both tiers; unless it is derived, with device slots from an allocator."""
    made = PoolEntry(
        name,
        HostPool.allocate(name, PackedLayout(geometry, tuple(drafts)), slots, capabilities),
        ArrayDevicePool.page_first(name, geometry, device_slots),
        mapper,
        is_primary_index_anchor=anchor,
        derived_from=derived_from,
        packed_draft_device_pools=tuple(
            ArrayDevicePool.layer_first(f"{name} draft {i}", draft, device_slots) for i, draft in enumerate(drafts)
        ),
    )
    return made if derived_from is not None else made.with_device_allocator(SlotAllocator(device_slots))


def group(*entries: PoolEntry) -> HostPoolGroup:
    return HostPoolGroup(LAYERS, entries)


@dataclass
class Reclaim:
    """Host eviction for one entry: gives back slots it was told to keep, and remembers what it was asked for."""

    pool: HostPool
    kept: list[int]
    asked: list[int]

    def evict(self, count: int) -> None:
        self.asked.append(count)
        short = count - self.pool.available
        gone, self.kept = self.kept[:short], self.kept[short:]
        if gone:
            self.pool.free(host_slots(*gone))

    def evictable(self) -> int:
        return len(self.kept)


def with_reclaim(given: PoolEntry) -> tuple[PoolEntry, Reclaim]:
    """The entry with a host eviction that frees whatever is put into its `kept`."""
    reclaim = Reclaim(given.host_pool, [], [])
    return replace(given, host_evict_fn=reclaim.evict, host_evictable_fn=reclaim.evictable), reclaim


def fill_cache(made: HostPoolGroup, reclaim: Reclaim, name: str, count: int) -> None:
    """Takes slots of a pool and lets `reclaim` evict them, as a tree would."""
    taken = made.alloc(count, name)
    assert taken is not None
    reclaim.kept += taken.tolist()
