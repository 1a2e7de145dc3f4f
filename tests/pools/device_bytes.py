"""Device pools for tests, read and written tensor by tensor, past the copies that are under test."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from hicache.device.array import ArrayDevicePool
from hicache.layout import DeviceLayout, PoolGeometry, TensorPlace
from hicache.pools import PoolEntry
from hicache.units import ByteArray, DeviceSlots, Tier

GARBAGE = 0xA5


class CountingPool(ArrayDevicePool):
    """Counts how often it was asked to stage; its views are made once, since a model reads them after every step."""

    def __init__(self, name: str, layout: DeviceLayout, buffers: Sequence[ByteArray]) -> None:
        super().__init__(name, layout, buffers)
        self.staged = 0
        self._views: dict[tuple[int, int], ByteArray] = {}

    def tensor_bytes(self, layer: int, tensor: int) -> ByteArray:
        if (layer, tensor) not in self._views:
            self._views[layer, tensor] = super().tensor_bytes(layer, tensor)
        return self._views[layer, tensor]

    def stage(self, slots: DeviceSlots) -> ByteArray:
        self.staged += 1
        return super().stage(slots)


def interleaved(geometry: PoolGeometry, slots: int, gap: int = 3) -> DeviceLayout:
    """One buffer, token by token: each token has its part of every tensor of every layer, `gap` bytes after each."""
    layers = [[spec.token_bytes + gap for spec in layer] for layer in geometry.layers]
    token_bytes = sum(map(sum, layers))
    slot_bytes = geometry.tokens_per_slot * token_bytes + gap
    starts = iter(accumulate((size for layer in layers for size in layer), initial=gap))
    places = tuple(
        tuple(
            TensorPlace(0, next(starts), (slot_bytes, token_bytes, *inner_strides(spec.shape, spec.item_bytes)))
            for spec in layer
        )
        for layer in geometry.layers
    )
    return DeviceLayout(geometry, slots, (gap + slots * slot_bytes,), places)


def inner_strides(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Strides in bytes of a contiguous array."""
    return tuple(item_bytes * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))


LAYOUTS = {
    "page first": DeviceLayout.page_first,
    "layer first": DeviceLayout.layer_first,
    "by item size": DeviceLayout.page_first_by_item_size,
    "interleaved": interleaved,
}


def make_pool(name: str, geometry: PoolGeometry, slots: int, layout: str) -> CountingPool:
    """Zeroed memory in one of `LAYOUTS`."""
    made = LAYOUTS[layout](geometry, slots)
    return CountingPool(name, made, [np.zeros(size, np.uint8) for size in made.buffers_bytes])


def members(entry: PoolEntry) -> list[ArrayDevicePool]:
    """The device pools whose bytes make up the entry's host page, in order."""
    pools = [entry.device_pool, *entry.packed_draft_device_pools]
    found = [pool for pool in pools if isinstance(pool, ArrayDevicePool)]
    assert len(found) == len(pools)
    return found


def all_slots(pool: ArrayDevicePool) -> ByteArray:
    """A copy of the bytes of every slot, [slots, slot_bytes], in the order of the geometry."""
    parts = [
        pool.tensor_bytes(layer, tensor).reshape(pool.slots, -1)
        for layer, specs in enumerate(pool.geometry.layers)
        for tensor in range(len(specs))
    ]
    return np.concatenate(parts, axis=1)


def write_slot(pool: ArrayDevicePool, slot: int, content: ByteArray) -> None:
    """Puts `content` [slot_bytes] into one slot, tensor by tensor."""
    start = 0
    for layer, specs in enumerate(pool.geometry.layers):
        for tensor in range(len(specs)):
            memory = pool.tensor_bytes(layer, tensor)[slot]
            memory[...] = content[start : start + memory.size].reshape(memory.shape)
            start += memory.size


def read_pages(entry: PoolEntry, tier: Tier) -> ByteArray:
    """A copy of what every slot of an entry holds in one tier, drafts included: [slots, page_bytes]."""
    if tier is Tier.HOST:
        return entry.host_pool.pages.copy()
    return np.concatenate([all_slots(pool) for pool in members(entry)], axis=1)


def write_page(entry: PoolEntry, tier: Tier, slot: int, content: ByteArray) -> None:
    """Puts a whole page, drafts included, into one slot."""
    if tier is Tier.HOST:
        entry.host_pool.pages[slot] = content
        return
    start = 0
    for pool in members(entry):
        stop = start + pool.geometry.slot_bytes
        write_slot(pool, slot, content[start:stop])
        start = stop
