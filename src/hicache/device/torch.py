"""Device pools in torch memory: zeroed when made, every byte moved by the slot, every tensor a view of that memory."""

from math import prod

import numpy as np
import torch

from hicache.device.array import ArrayDevicePool
from hicache.errors import ConfigError
from hicache.layout import DeviceLayout, PoolGeometry
from hicache.units import ByteArray, DeviceSlots, HostSlots

ZERO_SLOT = 0
"""A slot that nobody writes: it reads as zeros."""
TRASH_SLOT = 1
"""A slot that nobody reads: rows that only pad a batch are written there."""
RESERVED_SLOTS = 2
"""How many slots an allocator for an engine's pool keeps back: `SlotAllocator(slots, reserved=RESERVED_SLOTS)`."""


class TorchDevicePool:
    """Slots in CPU memory that torch computes on. Raises ConfigError for a layout whose items are not aligned."""

    def __init__(self, name: str, layout: DeviceLayout) -> None:
        _check_aligned(name, layout)
        self._memory = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in layout.buffers_bytes]
        self._bytes = ArrayDevicePool(name, layout, [buffer.numpy() for buffer in self._memory])
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}

    @classmethod
    def page_first(cls, name: str, geometry: PoolGeometry, slots: int) -> "TorchDevicePool":
        """A buffer for each item size, in which every slot's tensors lie together, in the order of its host page.

        Where all dtypes are of one size, a backup or load moves one long row per page.
        """
        return cls(name, DeviceLayout.page_first_by_item_size(geometry, slots))

    @classmethod
    def layer_first(cls, name: str, geometry: PoolGeometry, slots: int) -> "TorchDevicePool":
        """A buffer per layer and tensor, [slots, tokens, *shape]: what runs on contiguous slots needs no gathering."""
        return cls(name, DeviceLayout.layer_first(geometry, slots))

    @property
    def name(self) -> str:
        """For messages."""
        return self._bytes.name

    @property
    def geometry(self) -> PoolGeometry:
        """What one slot holds."""
        return self._bytes.geometry

    @property
    def slots(self) -> int:
        """How many slots there are, reserved ones included."""
        return self._bytes.slots

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(len(buffer) for buffer in self._memory)

    def tensor(self, layer: int, tensor: int) -> torch.Tensor:
        """A view of one tensor of one layer: [slots, tokens_per_slot, *shape], rows apart in page-first pools."""
        view = self._tensors.get((layer, tensor))
        if view is None:
            with torch.inference_mode(False):  # else what first asks under inference mode makes it read-only outside
                view = self._tensors[layer, tensor] = self._view(layer, tensor)
        return view

    def gather(self, layer: int, tensor: int, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Copies slots[i] (int64) of one tensor to out[i]: [len(slots), tokens_per_slot, *shape], contiguous."""
        torch.index_select(self.tensor(layer, tensor), 0, slots, out=out)

    def zero(self, slots: DeviceSlots) -> None:
        """Makes all bytes of `slots` zero."""
        zeros = np.zeros((1, self.geometry.slot_bytes), np.uint8)
        rows = HostSlots(np.zeros(len(slots), np.int32))
        for layer in range(len(self.geometry.layers)):
            self.load_layer(slots, zeros, rows, layer)

    def backup(self, slots: DeviceSlots, pages: ByteArray, rows: HostSlots) -> None:
        """Copies slots[i], all layers, to pages[rows[i]]."""
        self._bytes.backup(slots, pages, rows)

    def stage(self, slots: DeviceSlots) -> ByteArray:
        """The bytes of `slots`, all layers, gathered into a new contiguous array [len(slots), slot_bytes]."""
        return self._bytes.stage(slots)

    def load_layer(self, slots: DeviceSlots, pages: ByteArray, rows: HostSlots, layer: int) -> None:
        """Copies layer `layer` (counted in this pool) of pages[rows[i]] to slots[i]."""
        self._bytes.load_layer(slots, pages, rows, layer)

    def _view(self, layer: int, tensor: int) -> torch.Tensor:
        layout = self._bytes.layout
        spec = layout.geometry.layers[layer][tensor]
        place = layout.places[layer][tensor]
        shape = (layout.slots, layout.geometry.tokens_per_slot, *spec.shape)
        inner_bytes = prod(shape[1:]) * spec.item_bytes
        span = self._memory[place.buffer][place.offset_bytes :]
        reach = (layout.slots - 1) * place.strides_bytes[0] + inner_bytes
        items = span[:reach].view(torch_dtype(spec.dtype))
        return items.as_strided(shape, [stride // spec.item_bytes for stride in place.strides_bytes])


def _check_aligned(name: str, layout: DeviceLayout) -> None:
    for layer, (specs, places) in enumerate(zip(layout.geometry.layers, layout.places, strict=True)):
        for spec, place in zip(specs, places, strict=True):
            if any(step % spec.item_bytes for step in (place.offset_bytes, *place.strides_bytes)):
                raise ConfigError(
                    f"device pool {name!r}: tensor {spec.name!r} of layer {layer} starts at byte {place.offset_bytes}"
                    f" with strides {place.strides_bytes}; torch needs multiples of the {spec.item_bytes} bytes of"
                    f" {spec.dtype}: lay it out page_first_by_item_size or layer_first"
                )


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a `TensorSpec` dtype name."""
    return _DTYPES[name]


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.uint16,
        torch.int16,
        torch.float16,
        torch.bfloat16,
        torch.uint32,
        torch.int32,
        torch.float32,
        torch.uint64,
        torch.int64,
        torch.float64,
    )
}
