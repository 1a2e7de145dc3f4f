"""How the tokens of a step's segments lie in one forward of the model, row by row, as frozen values."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hicache.engine.segment import ROW_BLOCK, Segment, padded


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
