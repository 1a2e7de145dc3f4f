"""Drafted tokens change how many forwards an answer takes, never the answer: each token is chosen from its own logits.

A drafter guesses tokens; the model runs them all at once, and the request chooses token after token as if there had
been none, for as long as it chooses what was guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache.engine.compute import Hidden
from hicache.engine.request import Request
from hicache.engine.segment import TokenArray
from hicache.units import DeviceSlots, PoolName


def no_tokens() -> TokenArray:
    """No tokens at all."""
    return np.zeros(0, np.uint32)


@dataclass(slots=True)
class Trail:
    """How far a drafter has come with one sequence. The state of its first `ready` tokens is in the slots for good.

    `tried`: tokens at `ready`, `ready + 1`, ... whose state was written too, and is right if they become part of the
    sequence. `hidden` [tokens, hidden size]: the model's last hidden states of the tokens from `ready` on, where the
    drafter starts from these.
    """

    ready: int = 0
    tried: TokenArray = field(default_factory=no_tokens)
    hidden: Hidden | None = None


@dataclass(frozen=True, slots=True)
class Lead:
    """A sequence as a drafter sees it: all tokens that are known, of which the model has computed the first `computed`.

    `slots` are the device slots, by page, of the pool at whose slots the drafter's state lies. `ended`: no token will
    follow, so nothing need be held back.
    """

    tokens: TokenArray
    computed: int
    slots: Mapping[PoolName, DeviceSlots]
    trail: Trail
    ended: bool = False


class Drafter(Protocol):
    """Guesses what comes next. It keeps nothing of a sequence but in the trail and in the slots."""

    @property
    def source(self) -> PoolName:
        """The pool at whose slots its state lies."""

    @property
    def most(self) -> int:
        """The most tokens that it guesses at a time, 1 or more."""

    @property
    def lookahead(self) -> int:
        """Tokens behind a page that the page's state depends on."""

    def follow(self, trail: Trail, hidden: Hidden) -> None:
        """The model has computed tokens of a sequence: their last hidden states, [tokens, hidden size]."""

    def settle(self, leads: Sequence[Lead]) -> None:
        """Compute the state of tokens that the model has computed, as far as the known tokens fix it."""

    def propose(self, leads: Sequence[Lead], counts: Sequence[int]) -> list[TokenArray]:
        """Guesses for sequences of which only the last known token is not computed: up to `counts[i]` for each.

        There are slots for as many tokens behind the known ones.
        """


def choose(request: Request, logits: npt.ArrayLike, drafts: TokenArray, now_s: float) -> int:
    """Lets the request choose its next tokens, as long as they are those drafted. Returns how many drafts were right.

    `logits` [len(drafts) + 1, vocabulary] are those of the last token that was known, and of the drafts. The request
    may end at any of them.
    """
    right = 0
    for row, guess in zip(np.asarray(logits, np.float32), [*drafts.tolist(), None], strict=True):
        if request.advance(row, now_s) != guess:
            break
        right += 1
        if request.finished:
            break
    return right


def confirmed(lead: Lead) -> int:
    """How many of the tokens that were tried became part of the sequence."""
    trail = lead.trail
    known = lead.tokens[trail.ready : trail.ready + len(trail.tried)]
    same = known == trail.tried[: len(known)]
    return len(known) if same.all() else int(same.argmin())
