"""Where a device pool's bytes lie, as values: they map one to one onto host pages, or they are refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hicache.errors import ConfigError
from hicache.layout.disjoint import Extent, check_disjoint, check_one_to_one
from hicache.layout.geometry import PoolGeometry, TensorSpec
from hicache.units import ByteRange


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor of one layer lies on the device.

    Element (slot, token, *index) starts `offset_bytes + sum(strides_bytes * (slot, token, *index))` bytes into
    buffer `buffer`.
    """

    buffer: int
    offset_bytes: int
    strides_bytes: tuple[int, ...]

    @classmethod
    def of_tensor(
        cls,
        spec: TensorSpec,
        slots: int,
        tokens_per_slot: int,
        *,
        buffer: int,
        offset_bytes: int,
        shape: Sequence[int],
        strides_bytes: Sequence[int],
    ) -> "TensorPlace":
        """The place of an engine's tensor, whose axes are in the order of the spec, whatever their strides.

        Its shape is [slots, tokens_per_slot, *spec.shape] or [slots * tokens_per_slot, *spec.shape]; a state tensor
        ([slots, *spec.shape]) is the second form with one token per slot. Raises ConfigError for any other shape.
        """
        strides = tuple(strides_bytes)
        paged = (slots, tokens_per_slot, *spec.shape)
        flat = (slots * tokens_per_slot, *spec.shape)
        if tuple(shape) == paged:
            return cls(buffer, offset_bytes, strides)
        if tuple(shape) == flat:
            return cls(buffer, offset_bytes, (strides[0] * tokens_per_slot, *strides))
        raise ConfigError(
            f"tensor {spec.name!r} has shape {tuple(shape)}; it must be {paged} or {flat}:"
            " permute the view you register, or reshape the tensor"
        )


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of every slot that one strided copy moves: host bytes `host`, on the device an array of bytes.

    Byte (slot, *index) of the device array, of shape [slots, *dims], lies at
    `offset_bytes + slot * slot_stride_bytes + sum(strides_bytes * index)` of buffer `buffer`; its index order is the
    order of the bytes in `host`. The last dim is contiguous.
    """

    host: ByteRange
    buffer: int
    offset_bytes: int
    slot_stride_bytes: int
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether the block of one slot is one run of device bytes."""
        return len(self.dims) == 1


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """Where every tensor of every layer of a device pool lies; refused (ConfigError) unless it maps one to one.

    `buffers_bytes[i]` is the size of buffer i. `places[layer][tensor]` follows the geometry.
    """

    geometry: PoolGeometry
    slots: int
    buffers_bytes: tuple[int, ...]
    places: tuple[tuple[TensorPlace, ...], ...]

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ConfigError(f"a device pool has {self.slots} slots; give it at least 1")
        given, expected = [len(layer) for layer in self.places], [len(layer) for layer in self.geometry.layers]
        if given != expected:
            raise ConfigError(f"the layers have {expected} tensors, but places for {given}; give one for each")
        by_buffer: dict[int, list[Extent]] = {}
        for layer, places in enumerate(self.places):
            for tensor, place in enumerate(places):
                extent = self._extent(layer, tensor)
                check_one_to_one(extent)
                by_buffer.setdefault(place.buffer, []).append(extent)
        for extents in by_buffer.values():
            check_disjoint(extents)

    @classmethod
    def layer_first(cls, geometry: PoolGeometry, slots: int) -> "DeviceLayout":
        """A buffer per layer and tensor, each [slots, tokens, *shape]: as engines have it."""
        places: list[tuple[TensorPlace, ...]] = []
        buffers: list[int] = []
        for layer in geometry.layers:
            first = len(buffers)
            shapes = [(slots, geometry.tokens_per_slot, *spec.shape) for spec in layer]
            strides = [_contiguous_strides(shape, spec.item_bytes) for shape, spec in zip(shapes, layer, strict=True)]
            places.append(tuple(TensorPlace(first + i, 0, stride) for i, stride in enumerate(strides)))
            buffers.extend(slots * geometry.tokens_per_slot * spec.token_bytes for spec in layer)
        return cls(geometry, slots, tuple(buffers), tuple(places))

    @classmethod
    def page_first(cls, geometry: PoolGeometry, slots: int) -> "DeviceLayout":
        """One buffer [slots, slot_bytes]: every slot lies as its host page does."""
        rows_bytes = [geometry.slot_bytes]
        places = tuple(
            tuple(_in_row(spec, geometry, 0, geometry.part(layer, i).start, rows_bytes) for i, spec in enumerate(specs))
            for layer, specs in enumerate(geometry.layers)
        )
        return cls(geometry, slots, (slots * geometry.slot_bytes,), places)

    @classmethod
    def page_first_by_item_size(cls, geometry: PoolGeometry, slots: int) -> "DeviceLayout":
        """A buffer [slots, bytes] for each item size: every slot in order of its host page, every item aligned."""
        specs = [spec for layer in geometry.layers for spec in layer]
        buffers = {size: number for number, size in enumerate(sorted({spec.item_bytes for spec in specs}))}
        rows_bytes = [0] * len(buffers)
        starts: list[int] = []
        for spec in specs:
            buffer = buffers[spec.item_bytes]
            starts.append(rows_bytes[buffer])
            rows_bytes[buffer] += geometry.tokens_per_slot * spec.token_bytes
        offsets = iter(starts)
        places = tuple(
            tuple(_in_row(spec, geometry, buffers[spec.item_bytes], next(offsets), rows_bytes) for spec in layer)
            for layer in geometry.layers
        )
        return cls(geometry, slots, tuple(slots * row_bytes for row_bytes in rows_bytes), places)

    def layer_blocks(self, layer: int) -> tuple[Block, ...]:
        """What to copy for one layer, in host order, as few blocks as the device layout allows."""
        return _joined([self._block(layer, tensor) for tensor in range(len(self.places[layer]))])

    def slot_blocks(self) -> tuple[Block, ...]:
        """What to copy for a whole slot, in host order, as few blocks as the device layout allows."""
        return _joined([block for layer in range(len(self.places)) for block in self.layer_blocks(layer)])

    def _extent(self, layer: int, tensor: int) -> Extent:
        spec = self.geometry.layers[layer][tensor]
        place = self.places[layer][tensor]
        what = f"tensor {spec.name!r} of layer {layer}"
        sizes = (self.slots, self.geometry.tokens_per_slot, *spec.shape)
        if len(place.strides_bytes) != len(sizes):
            raise ConfigError(
                f"{what} has {len(place.strides_bytes)} strides for shape {sizes}; give one per dimension"
            )
        if not 0 <= place.buffer < len(self.buffers_bytes):
            raise ConfigError(f"{what} lies in buffer {place.buffer}; there are {len(self.buffers_bytes)}")
        extent = Extent(what, place.offset_bytes, tuple(zip(sizes, place.strides_bytes, strict=True)), spec.item_bytes)
        there = self.buffers_bytes[place.buffer]
        if place.offset_bytes < 0 or extent.stop_bytes > there:
            raise ConfigError(
                f"{what} takes bytes {place.offset_bytes} to {extent.stop_bytes} of a buffer of {there};"
                " register fewer slots or the whole tensor"
            )
        return extent

    def _block(self, layer: int, tensor: int) -> Block:
        spec = self.geometry.layers[layer][tensor]
        place = self.places[layer][tensor]
        dims = [self.geometry.tokens_per_slot, *spec.shape, spec.item_bytes]
        strides = [*place.strides_bytes[1:], 1]
        merged_dims, merged_strides = [dims[-1]], [1]
        for size, stride in zip(reversed(dims[:-1]), reversed(strides[:-1]), strict=True):
            if size == 1:
                continue
            if stride == merged_dims[0] * merged_strides[0]:
                merged_dims[0] *= size
            else:
                merged_dims.insert(0, size)
                merged_strides.insert(0, stride)
        return Block(
            self.geometry.part(layer, tensor),
            place.buffer,
            place.offset_bytes,
            place.strides_bytes[0],
            tuple(merged_dims),
            tuple(merged_strides),
        )


def _contiguous_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    sizes = [*shape[1:], item_bytes]
    return tuple(reversed(list(accumulate(reversed(sizes), lambda stride, size: stride * size))))


def _in_row(
    spec: TensorSpec, geometry: PoolGeometry, buffer: int, offset_bytes: int, rows_bytes: Sequence[int]
) -> TensorPlace:
    inner = _contiguous_strides((geometry.tokens_per_slot, *spec.shape), spec.item_bytes)
    return TensorPlace(buffer, offset_bytes, (rows_bytes[buffer], *inner))


def _joined(blocks: Sequence[Block]) -> tuple[Block, ...]:
    joined = [blocks[0]]
    for block in blocks[1:]:
        last = joined[-1]
        if _continues(last, block):
            size = last.dims[0] + block.dims[0]
            host = ByteRange(last.host.start, block.host.stop)
            joined[-1] = Block(host, last.buffer, last.offset_bytes, last.slot_stride_bytes, (size,), (1,))
        else:
            joined.append(block)
    return tuple(joined)


def _continues(last: Block, block: Block) -> bool:
    return (
        last.is_contiguous
        and block.is_contiguous
        and last.buffer == block.buffer
        and last.slot_stride_bytes == block.slot_stride_bytes
        and last.offset_bytes + last.dims[0] == block.offset_bytes
    )
