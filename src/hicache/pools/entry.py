"""An entry says all that a group knows of one pool: where it lies on both tiers, and how room is made there."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from hicache.coverage import Coverage, Full
from hicache.errors import ConfigError, InvariantError
from hicache.pools.device import DevicePool
from hicache.pools.host import HostPool
from hicache.pools.slots import SlotAllocator
from hicache.units import DeviceSlots, HostSlots, Int32Array, PoolName, Tier

_FULL = Full()


@dataclass(frozen=True, slots=True)
class SlotSide:
    """How a group takes, gives back and reclaims slots of one pool in one tier."""

    alloc: Callable[[int], Int32Array | None]
    free: Callable[[Int32Array], None]
    available: Callable[[], int]
    evict: Callable[[int], None]
    evictable: Callable[[], int]


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """One pool of a group.

    `layer_mapper` gives, for a model layer, the layer of this pool that it uses, or None. An evict function is given
    the absolute count of slots that must become free, and comes with an evictable function that says how many slots it
    could free now; it may evict from other pools too, and may raise. The device functions come together, or not at
    all (then no device slots are taken through the group). A pool with `derived_from` lives at the slots of
    that pool and has none of these functions. The layers of `packed_draft_device_pools` lie in this pool's
    host pages, at this pool's slots. `replicated`: ranks that share a model's layers hold equal bytes in it.
    """

    name: PoolName
    host_pool: HostPool
    device_pool: DevicePool
    layer_mapper: Callable[[int], int | None]
    is_primary_index_anchor: bool = False
    coverage: Coverage = _FULL
    derived_from: PoolName | None = None
    host_evict_fn: Callable[[int], None] | None = None
    host_evictable_fn: Callable[[], int] | None = None
    device_evict_fn: Callable[[int], None] | None = None
    device_evictable_fn: Callable[[], int] | None = None
    device_alloc_fn: Callable[[int], DeviceSlots | None] | None = None
    device_free_fn: Callable[[DeviceSlots], None] | None = None
    device_available_fn: Callable[[], int] | None = None
    packed_draft_device_pools: tuple[DevicePool, ...] = ()
    replicated: bool = False

    def with_device_allocator(self, allocator: SlotAllocator) -> "PoolEntry":
        """The same entry, with `allocator` as its device side."""

        def alloc(count: int) -> DeviceSlots | None:
            slots = allocator.alloc(count)
            return None if slots is None else DeviceSlots(slots)

        return replace(
            self,
            device_alloc_fn=alloc,
            device_free_fn=allocator.free,
            device_available_fn=lambda: allocator.available,
        )

    def side(self, tier: Tier) -> SlotSide:
        """How slots are handled in `tier` (DEVICE or HOST). Raises ConfigError when the entry can't take any there."""
        if self.derived_from is not None:
            raise ConfigError(
                f"pool {self.name!r} lives at the slots of {self.derived_from!r} and has none of its own;"
                f" name {self.derived_from!r} instead"
            )
        if tier is Tier.HOST:
            return self._host_side()
        if tier is Tier.DEVICE:
            return self._device_side()
        raise InvariantError(f"pool {self.name!r} has no slots in tier {tier.value}")

    def _host_side(self) -> SlotSide:
        pool = self.host_pool
        evict, evictable = _reclaim(self.host_evict_fn, self.host_evictable_fn)
        return SlotSide(pool.alloc, lambda slots: pool.free(HostSlots(slots)), lambda: pool.available, evict, evictable)

    def _device_side(self) -> SlotSide:
        alloc, free, available = self.device_alloc_fn, self.device_free_fn, self.device_available_fn
        if alloc is None or free is None or available is None:
            raise ConfigError(
                f"pool {self.name!r} has no device_alloc_fn, device_free_fn and device_available_fn;"
                " give all three, or with_device_allocator"
            )
        evict, evictable = _reclaim(self.device_evict_fn, self.device_evictable_fn)
        return SlotSide(alloc, lambda slots: free(DeviceSlots(slots)), available, evict, evictable)


def _reclaim(
    evict: Callable[[int], None] | None, evictable: Callable[[], int] | None
) -> tuple[Callable[[int], None], Callable[[], int]]:
    if evict is None or evictable is None:
        return _evict_nothing, _nothing_evictable
    return evict, evictable


def _evict_nothing(count: int) -> None:
    """Frees nothing."""


def _nothing_evictable() -> int:
    return 0
