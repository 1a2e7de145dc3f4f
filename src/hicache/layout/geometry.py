"""A pool's geometry as byte ranges of a host page: every byte of a page belongs to exactly one tensor of one layer.

A host page is one contiguous block: layer by layer, in it tensor by tensor, in it token by token. After the owner's
block come the blocks of its packed drafts, in order.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

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
