"""How ranks come to the same decisions: what differs between them passes through here, once per scheduler step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hicache.controller.place import Place
from hicache.transfer.messages import Completion


class Subject(Enum):
    """What ranks must have in common, compared in each step."""

    REQUESTS = "were given other requests"
    TRANSFERS = "moved other pages"
    STANDING = "have other slots, pins or nodes"


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank has seen since its last step. `standing`: numbers that must be the same on every rank."""

    completions: Sequence[Completion]
    now_s: float
    standing: Callable[[], bytes]


class Agree(Protocol):
    """Turns what one rank has seen into what all ranks have seen."""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""

    @property
    def rank(self) -> int:
        """Which of them this one is, from 0 on."""

    @property
    def place(self) -> Place:
        """Which part of the model it has."""

    def gather(self, message: bytes) -> tuple[bytes, ...]:
        """What every rank says, in the order of ranks. At the start only, by all of them. Raises RankError."""

    def step(self, seen: Seen) -> Sequence[Completion]:
        """The completions to settle in this step: those that every rank has, their bitmaps ANDed, by their ids.

        The one collective call of a step, made by every rank in every step. Raises RankError, within a deadline, when
        a rank is gone or late, and when ranks differ; from then on always.
        """

    def now(self, local_s: float) -> float:
        """One time for all ranks, in seconds, so that deadlines pass in the same step. Asks nobody."""

    def note(self, subject: Subject, *parts: bytes) -> None:
        """Something that every rank must be given, or decide, alike. Compared in the next step. Asks nobody."""

    def leave(self) -> Sequence[Completion]:
        """This rank ends: what it has seen and the others have not. Asks nobody."""


class OneRank:
    """A rank of its own agrees with itself."""

    @property
    def ranks(self) -> int:
        """One."""
        return 1

    @property
    def rank(self) -> int:
        """The first."""
        return 0

    @property
    def place(self) -> Place:
        """All of the model."""
        return Place()

    def gather(self, message: bytes) -> tuple[bytes, ...]:
        """Its own message."""
        return (message,)

    def step(self, seen: Seen) -> Sequence[Completion]:
        """All of them, as they came."""
        return seen.completions

    def now(self, local_s: float) -> float:
        """The rank's own time."""
        return local_s

    def note(self, subject: Subject, *parts: bytes) -> None:
        """There is nobody to differ from."""

    def leave(self) -> Sequence[Completion]:
        """Nothing was held back."""
        return ()
