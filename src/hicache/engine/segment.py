"""What a step computes, as frozen values: parts of sequences, and how their rows lie in one forward of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hicache.units import DeviceSlots, PoolName

TokenArray: TypeAlias = npt.NDArray[np.uint32]
StateSlots: TypeAlias = Mapping[PoolName, int]
"""A slot in every pool of recurrent state."""

ROW_BLOCK = 4
"""No linear layer runs on fewer rows: below that some machines use products with other last bits."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a step that belongs to one sequence: `token_ids` at positions `start`, `start + 1`, ...

    `slots` are the device slots of its pages per token pool, in page order, at least up to the segment's last position
    (HOLE where its tokens can't see). Recurrent state is read from `state_from` (None: the sequence begins here) and
    kept in `state_to` (None: nowhere). Logits are wanted of its last `logit_rows` tokens. `kv_tokens` asks for more
    padding than the rules need (the self-test does).
    """

    token_ids: TokenArray
    start: int
    slots: Mapping[PoolName, DeviceSlots]
    state_from: StateSlots | None = None
    state_to: StateSlots | None = None
    logit_rows: int = 1
    kv_tokens: int = 0

    @property
    def stop(self) -> int:
        """Tokens of the sequence whose state is in its slots after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Rows:
    """One forward over [batch, width] token positions, counted row by row; rows from `used` on only pad.

    `firsts[i]` is the row of the first token of segment i; its other tokens follow.
    """

    segments: tuple[Segment, ...]
    firsts: tuple[int, ...]
    batch: int
    width: int
    used: int

    @classmethod
    def flat(cls, segments: Sequence[Segment], block: int = ROW_BLOCK) -> "Rows":
        """All tokens of all segments in one line, padded to a multiple of `block`."""
        counts = [len(segment.token_ids) for segment in segments]
        firsts = np.cumsum([0, *counts[:-1]])
        used = sum(counts)
        return cls(tuple(segments), tuple(int(first) for first in firsts), 1, padded(used, block), used)

    @classmethod
    def stacked(cls, segments: Sequence[Segment]) -> "Rows":
        """One token of each segment, each in a line of its own."""
        count = len(segments)
        return cls(tuple(segments), tuple(range(count)), padded(count, ROW_BLOCK), 1, count)

    @property
    def count(self) -> int:
        """Rows in all."""
        return self.batch * self.width

    def token_ids(self) -> torch.Tensor:
        """Token ids, int64 [batch, width]; 0 where rows only pad."""
        ids = np.zeros(self.count, np.int64)
        ids[: self.used] = np.concatenate([segment.token_ids for segment in self.segments])
        return torch.from_numpy(ids).view(self.batch, self.width)

    def positions(self) -> torch.Tensor:
        """Positions in the sequences, int64 [batch, width]; 0 where rows only pad."""
        positions = np.zeros(self.count, np.int64)
        positions[: self.used] = np.concatenate([np.arange(one.start, one.stop) for one in self.segments])
        return torch.from_numpy(positions).view(self.batch, self.width)

    def logit_rows(self) -> list[int]:
        """The rows whose logits are wanted, segment after segment."""
        rows: list[int] = []
        for first, segment in zip(self.firsts, self.segments, strict=True):
            stop = first + len(segment.token_ids)
            rows.extend(range(stop - segment.logit_rows, stop))
        return rows


def padded(count: int, block: int) -> int:
    """`count` rounded up to a multiple of `block`."""
    return -(-count // block) * block
