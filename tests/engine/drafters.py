"""Drafters whose guesses the test decides, and what it takes to look at a core's drafts."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np

from hicache.builder import ModelDescription, describe_model
from hicache.engine.model import CausalModel
from hicache.engine.segment import TokenArray
from hicache.engine.speculation import Lead
from hicache.engine.work import CoreOptions
from hicache.testing.families import build_tiny
from hicache.units import Tier
from tests.engine.bench import Bench
from tests.engine.tiny import PAGE

OPTIONS = CoreOptions(max_running=4, chunk_tokens=32)


class Oracle:
    """Knows whole sequences, prompts with answers, and guesses what follows; wrong where `wrong(position)` says so."""

    lookahead = 0

    def __init__(
        self,
        sequences: Iterable[Sequence[int]],
        source: str,
        most: int = 4,
        wrong: Callable[[int], bool] = lambda position: False,
    ) -> None:
        self.sequences = [list(one) for one in sequences]
        self.source = source
        self.most = most
        self.asked: list[int] = []
        self._wrong = wrong

    def follow(self, trail, hidden) -> None:
        pass

    def settle(self, leads: Sequence[Lead]) -> None:
        for lead in leads:
            lead.trail.ready = lead.computed

    def propose(self, leads: Sequence[Lead], counts: Sequence[int]) -> list[TokenArray]:
        self.settle(leads)
        self.asked.extend(counts)
        return [self._guess(lead.tokens.tolist(), count) for lead, count in zip(leads, counts, strict=True)]

    def _guess(self, known: list[int], count: int) -> TokenArray:
        whole = next((one for one in self.sequences if one[: len(known)] == known), known)
        guess = [*whole[len(known) : len(known) + count], *[0] * count][:count]
        for index in range(count):
            if self._wrong(len(known) + index):
                guess[index] = (guess[index] + 1) % 250
        return np.array(guess, np.uint32)


class Recorder:
    """Another drafter, whose guesses are written down."""

    def __init__(self, drafter) -> None:
        self.drafter = drafter
        self.guesses: list[list[int]] = []
        self.known: list[list[int]] = []

    source = property(lambda self: self.drafter.source)
    most = property(lambda self: self.drafter.most)
    lookahead = property(lambda self: self.drafter.lookahead)

    def follow(self, trail, hidden) -> None:
        self.drafter.follow(trail, hidden)

    def settle(self, leads) -> None:
        self.drafter.settle(leads)

    def propose(self, leads, counts):
        self.known.extend(lead.tokens.tolist() for lead in leads)
        guesses = self.drafter.propose(leads, counts)
        self.guesses.extend(guess.tolist() for guess in guesses)
        return guesses

    def take(self) -> list[list[int]]:
        taken, self.guesses = self.guesses, []
        return taken


@cache
def tiny(family: str) -> tuple[CausalModel, ModelDescription]:
    module = build_tiny(family)
    return CausalModel(module), describe_model(module.config, PAGE, "float32")


def source(description: ModelDescription) -> str:
    """A pool that any drafter may lie at."""
    return description.pools[0].name


def counted(bench: Bench) -> tuple[int, int]:
    """Tokens drafted and accepted so far."""
    stats = bench.core.stats()
    return stats.drafted_tokens, stats.accepted_tokens


def forget_device(bench: Bench) -> None:
    """Leave nothing on the device that is on the host."""
    for _ in range(20):
        bench.settle()
        if not bench.cache.evict(Tier.DEVICE) and not bench.core.transfers_in_flight:
            return
    raise AssertionError("the device never gets empty")
