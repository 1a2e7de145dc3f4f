"""What the scheduler needs of whatever computes its steps: nothing of it is torch's, so a simulator can compute too."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

from hicache.engine.segment import Segment, StateSlots
from hicache.units import PoolName

Hidden: TypeAlias = Any
"""A model's last hidden states, [tokens, hidden size]: cut by tokens here, looked into by its own drafter only."""


class Routing(Protocol):
    """Which pools a model works on."""

    @property
    def token_pools(self) -> tuple[PoolName, ...]:
        """Pools with slots of their own that hold something per token."""

    @property
    def state_pools(self) -> tuple[PoolName, ...]:
        """Pools of recurrent state."""

    @property
    def sees_less(self) -> bool:
        """Whether some tokens see only a part of what is before them, so that pages behind it can go."""


class Output(Protocol):
    """What came of one segment."""

    @property
    def logits(self) -> npt.ArrayLike:
        """Of its last tokens, float32 [logit_rows, vocabulary]."""

    @property
    def hidden(self) -> Hidden:
        """Of all its tokens, [tokens, hidden size]."""

    def keep_state(self, slots: StateSlots) -> None:
        """Keep the recurrent state after the segment's last token in `slots` after all."""


class StepExecutor(Protocol):
    """Computes steps over device pools."""

    @property
    def routes(self) -> Routing:
        """Which pools it works on."""

    def run(self, segments: Sequence[Segment], before_layer: Callable[[int], None]) -> Sequence[Output]:
        """Computes all segments; `before_layer` returns when what was loaded of a layer is there."""

    def copy_state(self, source: StateSlots, to: StateSlots) -> None:
        """Copies the recurrent state in some slots to others."""
