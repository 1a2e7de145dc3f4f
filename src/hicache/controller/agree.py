"""How ranks come to the same decisions: what differs between them passes through here, once per scheduler step."""

from collections.abc import Sequence
from typing import Protocol

from hicache.transfer.messages import Completion


class Agree(Protocol):
    """Turns what one rank has seen into what all ranks have seen."""

    def completions(self, ready: Sequence[Completion]) -> Sequence[Completion]:
        """The completions to settle in this step: those that every rank has, their bitmaps ANDed, in one order."""

    def now(self, local_s: float) -> float:
        """One time for all ranks, in seconds, so that deadlines pass in the same step."""


class OneRank:
    """A rank of its own agrees with itself."""

    def completions(self, ready: Sequence[Completion]) -> Sequence[Completion]:
        """All of them, as they came."""
        return ready

    def now(self, local_s: float) -> float:
        """The rank's own time."""
        return local_s
