"""Device pools in ordinary memory, as numpy arrays: for engines without torch, and for tests. Any mappable layout."""

import ctypes
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.lib.stride_tricks import as_strided

from hicache.errors import ConfigError
from hicache.layout import Block, DeviceLayout, PoolGeometry, TensorPlace, TensorSpec
from hicache.pools.rows import copy_rows
from hicache.units import ByteArray, DeviceSlots, HostSlots

AnyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class ArrayDevicePool:
    """A device pool over numpy memory, in any layout that maps one to one (see `DeviceLayout`)."""

    def __init__(self, name: str, layout: DeviceLayout, buffers: Sequence[ByteArray]) -> None:
        """`buffers[i]` is uint8 [layout.buffers_bytes[i]]."""
        sizes = tuple(len(buffer) for buffer in buffers)
        if sizes != layout.buffers_bytes:
            raise ConfigError(
                f"device pool {name!r}: buffers of {sizes} bytes; its layout needs {layout.buffers_bytes}"
            )
        self._name = name
        self._layout = layout
        self._buffers = tuple(buffers)
        layers = range(len(layout.geometry.layers))
        self._layer_views = [[self._view(block) for block in layout.layer_blocks(layer)] for layer in layers]
        self._slot_views = [self._view(block) for block in layout.slot_blocks()]
        self._owners: tuple[AnyArray, ...] = ()

    @classmethod
    def layer_first(cls, name: str, geometry: PoolGeometry, slots: int) -> Self:
        """Zeroed memory, an array per layer and tensor."""
        return cls._zeroed(name, DeviceLayout.layer_first(geometry, slots))

    @classmethod
    def page_first(cls, name: str, geometry: PoolGeometry, slots: int) -> Self:
        """Zeroed memory, one array in which every slot lies as its host page does."""
        return cls._zeroed(name, DeviceLayout.page_first(geometry, slots))

    @classmethod
    def _zeroed(cls, name: str, layout: DeviceLayout) -> Self:
        return cls(name, layout, [np.zeros(size, np.uint8) for size in layout.buffers_bytes])

    @classmethod
    def from_arrays(cls, name: str, geometry: PoolGeometry, slots: int, arrays: Sequence[Sequence[AnyArray]]) -> Self:
        """An engine's own arrays, `arrays[layer][tensor]`, views of any kind: packed, permuted, strided.

        Each has the shape [slots, tokens_per_slot, *shape] or [slots * tokens_per_slot, *shape], and the dtype of its
        spec; for one that numpy lacks (bfloat16, float8) an unsigned integer of the same size. Raises ConfigError for
        anything else, and for memory that does not map one to one.
        """
        if [len(layer) for layer in arrays] != [len(layer) for layer in geometry.layers]:
            raise ConfigError(f"device pool {name!r}: give one array for each layer and tensor of its geometry")
        try:
            spans = _spans([array for layer in arrays for array in layer])
            places = tuple(
                tuple(_place(array, spec, geometry, slots, spans) for array, spec in zip(*layer, strict=True))
                for layer in zip(arrays, geometry.layers, strict=True)
            )
            layout = DeviceLayout(geometry, slots, tuple(stop - start for start, stop in spans), places)
        except ConfigError as error:
            raise ConfigError(f"device pool {name!r}: {error}") from error
        pool = cls(name, layout, [_memory(start, stop) for start, stop in spans])
        pool._owners = tuple(array for layer in arrays for array in layer)
        return pool

    @property
    def name(self) -> str:
        """For messages."""
        return self._name

    @property
    def geometry(self) -> PoolGeometry:
        """What one slot holds."""
        return self._layout.geometry

    @property
    def slots(self) -> int:
        """How many slots there are, reserved ones included."""
        return self._layout.slots

    @property
    def layout(self) -> DeviceLayout:
        """Where the bytes lie."""
        return self._layout

    def tensor_bytes(self, layer: int, tensor: int) -> ByteArray:
        """A view of one tensor's memory: uint8 [slots, tokens_per_slot, *shape, item bytes]."""
        spec = self.geometry.layers[layer][tensor]
        place = self._layout.places[layer][tensor]
        shape = (self.slots, self.geometry.tokens_per_slot, *spec.shape, spec.item_bytes)
        return as_strided(self._buffers[place.buffer][place.offset_bytes :], shape, (*place.strides_bytes, 1))

    def backup(self, slots: DeviceSlots, pages: ByteArray, rows: HostSlots) -> None:
        """Copies slots[i], all layers, to pages[rows[i]]."""
        for block, view in self._slot_views:
            copy_rows(_host_view(pages, block), rows, view, slots)

    def stage(self, slots: DeviceSlots) -> ByteArray:
        """The bytes of `slots`, all layers, gathered into a new contiguous array [len(slots), slot_bytes]."""
        staged = np.empty((len(slots), self.geometry.slot_bytes), np.uint8)
        self.backup(slots, staged, HostSlots(np.arange(len(slots), dtype=np.int32)))
        return staged

    def load_layer(self, slots: DeviceSlots, pages: ByteArray, rows: HostSlots, layer: int) -> None:
        """Copies layer `layer` (counted in this pool) of pages[rows[i]] to slots[i]."""
        for block, view in self._layer_views[layer]:
            copy_rows(view, slots, _host_view(pages, block), rows)

    def _view(self, block: Block) -> tuple[Block, ByteArray]:
        shape = (self.slots, *block.dims)
        strides = (block.slot_stride_bytes, *block.strides_bytes)
        return block, as_strided(self._buffers[block.buffer][block.offset_bytes :], shape, strides)


def _host_view(pages: ByteArray, block: Block) -> ByteArray:
    """The block's bytes of every host page, [host slots, *dims]: a view, since a page's bytes are contiguous."""
    return pages[:, block.host.start : block.host.stop].reshape(len(pages), *block.dims)


def _spans(arrays: Sequence[AnyArray]) -> list[tuple[int, int]]:
    """The memory that the arrays lie in, as addresses; arrays whose bytes overlap or interleave share one span."""
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(byte_bounds(array) for array in arrays):
        if spans and start < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    return spans


def _place(
    array: AnyArray, spec: TensorSpec, geometry: PoolGeometry, slots: int, spans: Sequence[tuple[int, int]]
) -> TensorPlace:
    numpy_lacks_it = spec.dtype.startswith(("bfloat", "float8"))
    wanted = f"uint{8 * spec.item_bytes}" if numpy_lacks_it else spec.dtype
    if array.dtype.name != wanted or not array.dtype.isnative:
        raise ConfigError(f"tensor {spec.name!r} has dtype {array.dtype.str}; for {spec.dtype} register {wanted}")
    address = array.ctypes.data
    buffer = next(i for i, (start, stop) in enumerate(spans) if start <= address < stop)
    return TensorPlace.of_tensor(
        spec,
        slots,
        geometry.tokens_per_slot,
        buffer=buffer,
        offset_bytes=address - spans[buffer][0],
        shape=array.shape,
        strides_bytes=array.strides,
    )


def _memory(start: int, stop: int) -> ByteArray:
    return np.frombuffer(memoryview((ctypes.c_uint8 * (stop - start)).from_address(start)), np.uint8)
