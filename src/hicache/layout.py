"""A pool's geometry as byte ranges of a host page, and device layouts as values: always a bijection, or refused.

A host page is one contiguous block: layer by layer, in it tensor by tensor, in it token by token. After the owner's
block come the blocks of its packed drafts, in order. How the device lays the same bytes out never shows in it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from hicache.errors import ConfigError
from hicache.units import ByteRange

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
}
"""Bytes per element of every dtype a pool may hold."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of one layer: its shape per token (token pools) or per snapshot (state pools), and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(
                f"tensor {self.name!r}: dtype {self.dtype!r} is not known; use one of {sorted(ITEM_BYTES)}"
            )
        if any(size < 1 for size in self.shape):
            raise ConfigError(f"tensor {self.name!r}: shape {self.shape} has a size below 1; give sizes of at least 1")

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token (or one snapshot)."""
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """What one slot of a pool holds: per layer its tensors, each for `tokens_per_slot` tokens (1 for snapshots)."""

    layers: tuple[tuple[TensorSpec, ...], ...]
    tokens_per_slot: int
    _starts: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tokens_per_slot < 1:
            raise ConfigError(f"tokens_per_slot is {self.tokens_per_slot}; it must be at least 1")
        if not self.layers or not all(self.layers):
            raise ConfigError("a pool needs at least one layer, and every layer at least one tensor")
        starts: list[tuple[int, ...]] = []
        base = 0
        for layer in self.layers:
            sizes = [tensor.token_bytes * self.tokens_per_slot for tensor in layer]
            starts.append(tuple(accumulate(sizes, initial=base)))
            base = starts[-1][-1]
        object.__setattr__(self, "_starts", tuple(starts))

    @classmethod
    def uniform(cls, layers: int, tensors: Sequence[TensorSpec], tokens_per_slot: int) -> "PoolGeometry":
        """`layers` layers that all hold the same tensors."""
        return cls((tuple(tensors),) * layers, tokens_per_slot)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, all layers."""
        return self._starts[-1][-1]

    def layer_range(self, layer: int) -> ByteRange:
        """The bytes of a slot's block that belong to `layer`."""
        starts = self._starts[layer]
        return ByteRange(starts[0], starts[-1])

    def part(self, layer: int, tensor: int) -> ByteRange:
        """The bytes of a slot's block that belong to one tensor of one layer, in [token][*shape] order."""
        starts = self._starts[layer]
        return ByteRange(starts[tensor], starts[tensor + 1])

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the geometry: equal exactly when the bytes of a slot mean the same."""
        return hashlib.sha256(json.dumps(self._description()).encode()).hexdigest()

    def _description(self) -> list[object]:
        layers = [[[t.name, list(t.shape), t.dtype] for t in layer] for layer in self.layers]
        return [self.tokens_per_slot, layers]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A host page: the owner's block, then the blocks of the drafts packed into the same page."""

    own: PoolGeometry
    drafts: tuple[PoolGeometry, ...] = ()

    @property
    def page_bytes(self) -> int:
        """Bytes of one host page, drafts included."""
        return self.own.slot_bytes + sum(draft.slot_bytes for draft in self.drafts)

    @property
    def own_range(self) -> ByteRange:
        """The owner's bytes of the page."""
        return ByteRange(0, self.own.slot_bytes)

    def draft_range(self, index: int) -> ByteRange:
        """The bytes of the page that belong to packed draft `index`."""
        start = self.own.slot_bytes + sum(draft.slot_bytes for draft in self.drafts[:index])
        return ByteRange(start, start + self.drafts[index].slot_bytes)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the owner's and every draft's geometry; the owner's own when nothing is packed."""
        if not self.drafts:
            return self.own.fingerprint
        parts = [self.own.fingerprint, *(draft.fingerprint for draft in self.drafts)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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

    def span_bytes(self, slots: int) -> ByteRange:
        """The device bytes from the first to the last byte touched over all slots."""
        inner = sum((size - 1) * stride for size, stride in zip(self.dims, self.strides_bytes, strict=True))
        return ByteRange(self.offset_bytes, self.offset_bytes + (slots - 1) * self.slot_stride_bytes + inner + 1)

    def run_starts(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Where the contiguous runs (of dims[-1] bytes each) of slot 0 start, in bytes from the buffer's start."""
        starts = np.array([self.offset_bytes], np.int64)
        for size, stride in zip(self.dims[:-1], self.strides_bytes[:-1], strict=True):
            starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
        return starts


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
        if [len(layer) for layer in self.places] != [len(layer) for layer in self.geometry.layers]:
            raise ConfigError(
                f"the geometry has {[len(layer) for layer in self.geometry.layers]} tensors per layer, but"
                f" {[len(layer) for layer in self.places]} were given; give one per layer and tensor"
            )
        _check_bijection(self)

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
        places = tuple(
            tuple(
                TensorPlace(
                    0,
                    geometry.part(number, i).start,
                    (
                        geometry.slot_bytes,
                        *_contiguous_strides((geometry.tokens_per_slot, *spec.shape), spec.item_bytes),
                    ),
                )
                for i, spec in enumerate(layer)
            )
            for number, layer in enumerate(geometry.layers)
        )
        return cls(geometry, slots, (slots * geometry.slot_bytes,), places)

    def layer_blocks(self, layer: int) -> tuple[Block, ...]:
        """What to copy for one layer, in host order, as few blocks as the device layout allows."""
        return _joined([self._block(layer, tensor) for tensor in range(len(self.places[layer]))])

    def slot_blocks(self) -> tuple[Block, ...]:
        """What to copy for a whole slot, in host order, as few blocks as the device layout allows."""
        return _joined([block for layer in range(len(self.places)) for block in self.layer_blocks(layer)])

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


def _check_bijection(layout: DeviceLayout) -> None:
    by_buffer: dict[int, list[tuple[str, Block]]] = {}
    for layer, specs in enumerate(layout.geometry.layers):
        for tensor, spec in enumerate(specs):
            what = f"tensor {spec.name!r} of layer {layer}"
            place = layout.places[layer][tensor]
            _check_place(layout, place, spec, what)
            by_buffer.setdefault(place.buffer, []).append((what, layout._block(layer, tensor)))
    for members in by_buffer.values():
        _check_disjoint(members, layout.slots)


def _check_place(layout: DeviceLayout, place: TensorPlace, spec: TensorSpec, what: str) -> None:
    sizes = (layout.slots, layout.geometry.tokens_per_slot, *spec.shape)
    if len(place.strides_bytes) != len(sizes):
        raise ConfigError(f"{what} has {len(place.strides_bytes)} strides for shape {sizes}; give one per dimension")
    if not 0 <= place.buffer < len(layout.buffers_bytes):
        raise ConfigError(f"{what} lies in buffer {place.buffer}; there are {len(layout.buffers_bytes)}")
    last = place.offset_bytes + sum((n - 1) * stride for n, stride in zip(sizes, place.strides_bytes, strict=True))
    if place.offset_bytes < 0 or last + spec.item_bytes > layout.buffers_bytes[place.buffer]:
        raise ConfigError(
            f"{what} reaches byte {last + spec.item_bytes} of a buffer of {layout.buffers_bytes[place.buffer]};"
            " register fewer slots or the whole tensor"
        )
    reach = spec.item_bytes
    for stride, size in sorted(zip(place.strides_bytes, sizes, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            raise ConfigError(
                f"{what} has strides {place.strides_bytes} bytes for shape {sizes}: elements share bytes or run"
                " backwards, so it can't be mapped; register a tensor with memory of its own"
            )
        reach += (size - 1) * stride


def _check_disjoint(members: Sequence[tuple[str, Block]], slots: int) -> None:
    """Tensors of one buffer either lie apart as wholes, or interleave at one slot stride without sharing a byte."""
    ordered = sorted(members, key=lambda member: member[1].offset_bytes)
    cluster: list[tuple[str, Block]] = []
    reach = 0
    for member in ordered:
        span = member[1].span_bytes(slots)
        if cluster and span.start >= reach:
            _check_interleaved(cluster)
            cluster = []
        cluster.append(member)
        reach = max(reach, span.stop)
    _check_interleaved(cluster)


def _check_interleaved(cluster: Sequence[tuple[str, Block]]) -> None:
    if len(cluster) == 1:
        return
    for (first, a), (second, b) in pairwise(cluster):
        if a.slot_stride_bytes != b.slot_stride_bytes:
            raise ConfigError(
                f"{first} and {second} interleave with different slot strides ({a.slot_stride_bytes} and"
                f" {b.slot_stride_bytes} bytes), so they can't be mapped; register tensors of one layout"
            )
    stride = cluster[0][1].slot_stride_bytes
    starts = np.concatenate([block.run_starts() % stride for _, block in cluster])
    counts = [prod(block.dims[:-1]) for _, block in cluster]
    lengths = np.repeat([block.dims[-1] for _, block in cluster], counts)
    owners = np.repeat(np.arange(len(cluster)), counts)
    order = np.argsort(starts, kind="stable")
    starts, stops, owners = starts[order], (starts + lengths)[order], owners[order]
    next_starts = np.append(starts[1:], starts[0] + stride)
    clashes = np.flatnonzero(stops > next_starts)
    if len(clashes):
        first, second = owners[clashes[0]], owners[(clashes[0] + 1) % len(owners)]
        raise ConfigError(
            f"{cluster[first][0]} and {cluster[second][0]} share bytes, so they can't be mapped;"
            " register tensors that don't overlap"
        )
