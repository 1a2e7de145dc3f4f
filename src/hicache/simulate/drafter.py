"""A drafter whose state can be checked as the model's can, and whose guesses are as good as a scenario wants."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hicache.engine.segment import TokenArray
from hicache.engine.speculation import Lead, Trail, no_tokens
from hicache.simulate.broken import RuleError
from hicache.simulate.content import VOCABULARY, Alphabet
from hicache.simulate.memory import PoolMemory
from hicache.simulate.scenario import Drafting
from hicache.simulate.truth import Truth
from hicache.units import PoolName


@dataclass(frozen=True, slots=True)
class VirtualDrafter:
    """A drafter of the engine. A token's state is a function of all tokens up to `lookahead` after it."""

    source: PoolName
    lookahead: int
    memory: PoolMemory
    alphabet: Alphabet
    truth: Truth
    drafting: Drafting
    random: random.Random

    @property
    def most(self) -> int:
        """The most tokens that it guesses at a time."""
        return self.drafting.most

    def follow(self, trail: Trail, hidden: object) -> None:
        """It has no use for the model's hidden states."""

    def settle(self, leads: Sequence[Lead]) -> None:
        """Checks the state that there is, and adds what the known tokens fix."""
        for lead in leads:
            self._settle(lead)

    def propose(self, leads: Sequence[Lead], counts: Sequence[int]) -> list[TokenArray]:
        """Guesses; the state of what is guessed is written too, and is wrong where the guess is."""
        self.settle(leads)
        return [self._guess(lead, count) for lead, count in zip(leads, counts, strict=True)]

    def _settle(self, lead: Lead) -> None:
        trail = lead.trail
        hashes = self.alphabet.hashes(0, 0, lead.tokens)
        slots = lead.slots[self.source]
        if trail.ready:
            expected = self.memory.code.encode(hashes[self.lookahead : trail.ready + self.lookahead])
            found = self.memory.read(slots, 0, trail.ready)[: len(expected)]
            bad = np.flatnonzero((found != expected).any(1))
            if len(bad):
                raise RuleError("drafts", f"pool {self.memory.name!r} is wrong at position {int(bad[0])}")
        trail.tried = no_tokens()
        stop = min(lead.computed, len(lead.tokens) - self.lookahead)
        if stop > trail.ready:
            self.memory.write(slots, trail.ready, hashes[trail.ready + self.lookahead : stop + self.lookahead])
            trail.ready = stop

    def _guess(self, lead: Lead, count: int) -> TokenArray:
        start = len(lead.tokens)
        hashed = int(self.alphabet.hashes(0, 0, lead.tokens)[-1])
        guesses: list[int] = []
        for position in range(start, start + count):
            right = self.truth.next(hashed)
            wrong = right is None or self.random.random() >= self.drafting.right
            guesses.append(self.random.randrange(VOCABULARY) if wrong or right is None else right)
            hashed = self.alphabet.step(hashed, position, guesses[-1])
        known = np.concatenate((lead.tokens, np.array(guesses, np.uint32)))
        hashes = self.alphabet.hashes(0, 0, known)
        ready = lead.trail.ready
        self.memory.write(lead.slots[self.source], ready, hashes[ready + self.lookahead :])
        return np.array(guesses, np.uint32)
