"""Token pools in one forward: new rows go to their slots, and what a segment sees comes back in order of position.

What comes back is padded to a multiple of KV_BLOCK_TOKENS and starts at such a multiple: where the machine's matrix
products keep a row's bits (the self-test finds out), they don't depend on the chunk or batch then.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

import numpy as np
import torch

from hicache.device.torch import TRASH_SLOT, ZERO_SLOT, TorchDevicePool, torch_dtype
from hicache.engine.attention import score_bias
from hicache.engine.rows import Rows
from hicache.engine.segment import ROW_BLOCK, Segment, padded
from hicache.errors import InvariantError
from hicache.layout import PoolGeometry, TensorSpec
from hicache.units import HOLE, DeviceSlots, PoolName

KV_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Sight:
    """Which earlier tokens a token sees: all, the last `window` (itself included), or those of its own `chunk`."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0

    def visible(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Whether the tokens at positions `rows` see those at `keys`; bool [len(rows), len(keys)]."""
        rows = rows[:, None]
        seen = keys <= rows
        if self.chunk is not None:
            return seen & (keys // self.chunk == rows // self.chunk)
        if self.window is not None:
            return seen & (keys > rows - self.window)
        return seen


@dataclass(frozen=True, slots=True)
class Read:
    """What one segment sees of a pool: `kv_tokens` tokens from position `base` on, right up to `stop`.

    `slots` are its pages' slots, int64; `visible` is bool [rows, kv_tokens], its rows padded to ROW_BLOCK, and `bias`
    the same as what is added to scores: 0 or minus infinity.
    """

    slots: torch.Tensor
    base: int
    stop: int
    kv_tokens: int
    visible: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Write:
    """Rows `first` to `first + pages * tokens` of the step go to slots `slot`, ..., each from token `offset` on."""

    first: int
    slot: int
    pages: int
    offset: int
    tokens: int


class Scratch:
    """Where keys and values of one sequence are gathered: tensors that every layer and step uses again.

    There is one per position in a layer and kind of tensor, with room for `max_tokens` and the padding around them.
    """

    def __init__(self, geometries: Iterable[PoolGeometry], max_tokens: int) -> None:
        self._tensors = {
            key: torch.zeros(tokens, *key[1], dtype=torch_dtype(key[2]))
            for key, tokens in _scratch_tokens(geometries, max_tokens).items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def tokens(self, part: int, spec: TensorSpec) -> torch.Tensor:
        """A buffer [tokens, *spec.shape] for tensor `part` of a layer."""
        return self._tensors[part, spec.shape, spec.dtype]


def scratch_bytes(geometries: Iterable[PoolGeometry], max_tokens: int) -> int:
    """Bytes that a `Scratch` will hold."""
    sizes = _scratch_tokens(geometries, max_tokens)
    return sum(tokens * TensorSpec("", shape, dtype).token_bytes for (_, shape, dtype), tokens in sizes.items())


def _scratch_tokens(geometries: Iterable[PoolGeometry], max_tokens: int) -> dict[tuple[int, tuple[int, ...], str], int]:
    sizes: dict[tuple[int, tuple[int, ...], str], int] = {}
    for geometry in geometries:
        aligned = lcm(KV_BLOCK_TOKENS, geometry.tokens_per_slot)
        tokens = padded(max_tokens, KV_BLOCK_TOKENS) + aligned + KV_BLOCK_TOKENS
        for layer in geometry.layers:
            for part, spec in enumerate(layer):
                key = (part, spec.shape, spec.dtype)
                sizes[key] = max(tokens, sizes.get(key, 0))
    return sizes


class TokenPoolStep:
    """One token pool in one forward. `source` names the pool whose slots it lives at: itself, unless it is derived.

    What is read is padded to a multiple of `block` tokens.
    """

    def __init__(
        self, pool: TorchDevicePool, source: PoolName, sight: Sight, rows: Rows, block: int = KV_BLOCK_TOKENS
    ) -> None:
        self._pool = pool
        self.rows = rows
        page_tokens = pool.geometry.tokens_per_slot
        self._writes: list[_Write] = []
        reads: list[Read] = []
        for first, segment in zip(rows.firsts, rows.segments, strict=True):
            slots = segment.slots[source]
            self._writes.extend(_writes(segment, slots, first, page_tokens))
            reads.append(_read(segment, slots, sight, page_tokens, block, pool.tensor(0, 0).dtype))
        self._writes.extend(_Write(pad, TRASH_SLOT, 1, 0, 1) for pad in range(rows.used, rows.count))
        self.reads = tuple(reads)

    def write(self, layer: int, part: int, values: torch.Tensor) -> None:
        """Stores tensor `part` of pool layer `layer` for every row: [rows, *shape]."""
        target = self._pool.tensor(layer, part)
        for write in self._writes:
            source = values[write.first : write.first + write.pages * write.tokens]
            where = target[write.slot : write.slot + write.pages, write.offset : write.offset + write.tokens]
            where.copy_(source.view(write.pages, write.tokens, *source.shape[1:]))

    def gather(self, layer: int, part: int, read: Read, scratch: Scratch) -> torch.Tensor:
        """What a segment sees, [kv_tokens, *shape], zero after its last token; good until the next gathering."""
        out = scratch.tokens(part, self._pool.geometry.layers[layer][part])
        self._fill(layer, part, read, out)
        return out[: read.kv_tokens]

    def gather_all(self, layer: int, part: int) -> torch.Tensor:
        """What all segments see, each in a line of its own if the rows are stacked, else joined in one line.

        [batch, tokens, *shape], zero where nothing is: `places` says where each segment's lie.
        """
        tensor = self._pool.tensor(layer, part)
        batch, tokens = self._joined_size()
        joined = tensor.new_zeros(batch, tokens, *tensor.shape[2:])
        for read, (line, first) in zip(self.reads, self.places(), strict=True):
            pages = torch.index_select(tensor, 0, read.slots).flatten(0, 1)
            joined[line, first : first + read.stop - read.base] = pages[: read.stop - read.base]
        return joined

    def places(self) -> list[tuple[int, int]]:
        """Line and first token of each segment's part of what `gather_all` returns."""
        if self.rows.batch > 1:
            return [(index, 0) for index in range(len(self.reads))]
        firsts = np.cumsum([0, *(read.kv_tokens for read in self.reads)])
        return [(0, int(first)) for first in firsts[:-1]]

    def joint_mask(self) -> torch.Tensor:
        """What every row sees of what `gather_all` returns: bool [batch, 1, width, tokens]."""
        batch, tokens = self._joined_size()
        mask = torch.zeros(batch, 1, self.rows.width, tokens, dtype=torch.bool)
        for first, segment, read, (line, place) in zip(
            self.rows.firsts, self.rows.segments, self.reads, self.places(), strict=True
        ):
            count = len(segment.token_ids)
            row = 0 if self.rows.batch > 1 else first
            mask[line, 0, row : row + count, place : place + read.kv_tokens] = read.visible[:count]
        return mask

    def _joined_size(self) -> tuple[int, int]:
        counts = [read.kv_tokens for read in self.reads]
        return (self.rows.batch, max(counts)) if self.rows.batch > 1 else (1, sum(counts))

    def _fill(self, layer: int, part: int, read: Read, out: torch.Tensor) -> None:
        page_tokens = self._pool.geometry.tokens_per_slot
        pages = out[: len(read.slots) * page_tokens].view(len(read.slots), page_tokens, *out.shape[1:])
        self._pool.gather(layer, part, read.slots, pages)
        out[read.stop - read.base : read.kv_tokens].zero_()


def _writes(segment: Segment, slots: DeviceSlots, row: int, page_tokens: int) -> list[_Write]:
    writes: list[_Write] = []
    position = segment.start
    while position < segment.stop:
        page, offset = divmod(position, page_tokens)
        tokens = min(page_tokens - offset, segment.stop - position)
        slot, first = int(slots[page]), row + position - segment.start
        if slot == HOLE:
            raise InvariantError(f"a token at position {position} has no slot to be written to")
        last = writes[-1] if writes else None
        if last and last.tokens == tokens == page_tokens and slot == last.slot + last.pages:
            writes[-1] = _Write(last.first, last.slot, last.pages + 1, 0, tokens)
        else:
            writes.append(_Write(first, slot, 1, offset, tokens))
        position += tokens
    return writes


def _read(segment: Segment, slots: DeviceSlots, sight: Sight, page_tokens: int, block: int, dtype: torch.dtype) -> Read:
    first = sight.first(segment.start)
    aligned = lcm(block, page_tokens)
    base = first // aligned * aligned
    kv_tokens = max(padded(segment.stop - base, block), segment.kv_tokens)
    run = np.asarray(slots[base // page_tokens : -(-segment.stop // page_tokens)], dtype=np.int64)
    unseen = first // page_tokens - base // page_tokens
    if (run[unseen:] == HOLE).any():
        raise InvariantError(f"tokens from position {first} on are seen at {segment.start}, but not all have slots")
    run = np.where(np.arange(len(run)) < unseen, ZERO_SLOT, run)
    rows = torch.arange(segment.start, segment.start + padded(len(segment.token_ids), ROW_BLOCK))
    visible = sight.visible(rows.clamp(max=segment.stop - 1), torch.arange(base, base + kv_tokens))
    bias = score_bias(visible, dtype)
    return Read(torch.from_numpy(run), base, segment.stop, kv_tokens, visible, bias)
