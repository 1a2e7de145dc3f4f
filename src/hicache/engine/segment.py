"""What a step computes, as frozen values: parts of sequences, in tokens and slots."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

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


def padded(count: int, block: int) -> int:
    """`count` rounded up to a multiple of `block`."""
    return -(-count // block) * block
