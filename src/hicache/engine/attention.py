"""One step of the model over paged KV: a row's attention has the same bits whatever chunk or batch it runs in.

Three rules make it so, where the machine's matrix products keep a row's bits (the self-test finds out): keys and
values are padded to a multiple of KV_BLOCK_TOKENS with zeros that are masked, a sequence's query rows to a multiple of
ROW_BLOCK, and no linear layer ever runs on fewer than ROW_BLOCK rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional

from hicache.device.torch import TRASH_SLOT, TorchDevicePool
from hicache.units import DeviceSlots

TokenArray: TypeAlias = npt.NDArray[np.uint32]

KV_BLOCK_TOKENS = 512
ROW_BLOCK = 4
_KEY, _VALUE = 0, 1


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a step that belongs to one sequence: `token_ids` at positions `start`, `start + 1`, ...

    `slots` are the device slots of its pages, in page order, at least up to the last position of the segment.
    `kv_tokens` asks for more padding than the rules need (the self-test does).
    """

    token_ids: TokenArray
    start: int
    slots: DeviceSlots
    kv_tokens: int = 0

    @property
    def stop(self) -> int:
        """Tokens of the sequence whose KV is in its slots after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class _Write:
    """Rows `first` to `first + pages * tokens` of the step go to slots `slot`, ..., each from token `offset` on."""

    first: int
    slot: int
    pages: int
    offset: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Read:
    """Rows `first_row` to `last_row` of the step see the pages in `slots`; `mask` is -inf where they may not look."""

    first_row: int
    last_row: int
    slots: torch.Tensor
    kv_tokens: int
    stop: int
    mask: torch.Tensor


class Scratch:
    """Where one layer's keys and values of one sequence are gathered: two tensors that every step uses again.

    There is room for `max_tokens` and for a block of padding more than they need.
    """

    def __init__(self, pool: TorchDevicePool, max_tokens: int) -> None:
        page_tokens = pool.geometry.tokens_per_slot
        pages = -(-(padded(max_tokens, KV_BLOCK_TOKENS) + KV_BLOCK_TOKENS) // page_tokens)
        specs = pool.geometry.layers[0]
        self.pages = [
            torch.zeros(pages, page_tokens, *spec.shape, dtype=pool.tensor(0, index).dtype)
            for index, spec in enumerate(specs)
        ]
        self.tokens = [tensor.flatten(0, 1) for tensor in self.pages]

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(tensor.nbytes for tensor in self.pages)


class PagedStep:
    """What the attention of one step needs: where new keys and values go, and what every row sees.

    Made for one forward: `attend` is called once per layer, in order. `before_layer(layer)` returns when the layer's
    loaded pages are there.
    """

    def __init__(
        self,
        pool: TorchDevicePool,
        scratch: Scratch,
        segments: Sequence[Segment],
        before_layer: Callable[[int], None],
    ) -> None:
        self._pool = pool
        self._scratch = scratch
        self._before_layer = before_layer
        page_tokens = pool.geometry.tokens_per_slot
        self._writes: list[_Write] = []
        self._reads: list[_Read] = []
        row = 0
        for segment in segments:
            self._writes.extend(_writes(segment, row, page_tokens))
            self._reads.append(_read(segment, row, page_tokens))
            row += len(segment.token_ids)
        self.rows = padded(row, ROW_BLOCK)
        self._writes.extend(_Write(pad, TRASH_SLOT, 1, 0, 1) for pad in range(row, self.rows))
        padding = [0] * (self.rows - row)
        self.token_ids = torch.tensor([int(i) for s in segments for i in s.token_ids] + padding)
        self.positions = torch.tensor([p for s in segments for p in range(s.start, s.stop)] + padding)
        last = [read.last_row - 1 for read in self._reads]
        self.last_rows = torch.tensor(last + last[-1:] * (padded(len(last), ROW_BLOCK) - len(last)))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Stores the step's keys and values ([1, kv heads, rows, dim]), then attends: [1, rows, heads, dim]."""
        self._before_layer(layer)
        self._write(layer, _KEY, key[0].transpose(0, 1))
        self._write(layer, _VALUE, value[0].transpose(0, 1))
        heads, rows, width = query.shape[1], query.shape[2], value.shape[3]
        result = query.new_zeros(rows, heads, width)
        for read in self._reads:
            keys, values = (self._gather(layer, part, read) for part in (_KEY, _VALUE))
            count = read.last_row - read.first_row
            rows_of_sequence = query[:, :, read.first_row : read.last_row]
            rows_of_sequence = functional.pad(rows_of_sequence, (0, 0, 0, padded(count, ROW_BLOCK) - count))
            attended = functional.scaled_dot_product_attention(
                rows_of_sequence, keys, values, attn_mask=read.mask, scale=scale, enable_gqa=True
            )
            result[read.first_row : read.last_row] = attended[0, :, :count].transpose(0, 1)
        return result[None]

    def _write(self, layer: int, part: int, rows: torch.Tensor) -> None:
        target = self._pool.tensor(layer, part)
        for write in self._writes:
            source = rows[write.first : write.first + write.pages * write.tokens]
            where = target[write.slot : write.slot + write.pages, write.offset : write.offset + write.tokens]
            where.copy_(source.view(write.pages, write.tokens, *source.shape[1:]))

    def _gather(self, layer: int, part: int, read: _Read) -> torch.Tensor:
        self._pool.gather(layer, part, read.slots, self._scratch.pages[part][: len(read.slots)])
        tokens = self._scratch.tokens[part]
        tokens[read.stop : read.kv_tokens].zero_()
        return tokens[: read.kv_tokens].transpose(0, 1)[None]


def padded(count: int, block: int) -> int:
    """`count` rounded up to a multiple of `block`."""
    return -(-count // block) * block


def _writes(segment: Segment, row: int, page_tokens: int) -> list[_Write]:
    writes: list[_Write] = []
    position = segment.start
    while position < segment.stop:
        page, offset = divmod(position, page_tokens)
        tokens = min(page_tokens - offset, segment.stop - position)
        slot, first = int(segment.slots[page]), row + position - segment.start
        last = writes[-1] if writes else None
        if last and last.tokens == tokens == page_tokens and slot == last.slot + last.pages:
            writes[-1] = _Write(last.first, last.slot, last.pages + 1, 0, tokens)
        else:
            writes.append(_Write(first, slot, 1, offset, tokens))
        position += tokens
    return writes


def _read(segment: Segment, row: int, page_tokens: int) -> _Read:
    pages = -(-segment.stop // page_tokens)
    kv_tokens = max(padded(segment.stop, KV_BLOCK_TOKENS), segment.kv_tokens)
    rows = padded(len(segment.token_ids), ROW_BLOCK)
    seen_until = torch.arange(segment.start, segment.start + rows)
    mask = torch.zeros(rows, kv_tokens)
    mask.masked_fill_(torch.arange(kv_tokens) > seen_until[:, None], float("-inf"))
    slots = torch.from_numpy(np.asarray(segment.slots[:pages], dtype=np.int64))
    return _Read(row, row + len(segment.token_ids), slots, kv_tokens, segment.stop, mask)
