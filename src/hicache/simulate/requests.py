"""Requests as a seed draws them: shared beginnings, talks that grow, bursts, tenants, and who gives up."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache.engine.types import Chunk
from hicache.simulate.content import VOCABULARY
from hicache.simulate.scenario import Workload
from hicache.simulate.truth import Known


@dataclass(frozen=True, slots=True)
class Draft:
    """A request that is about to be made. `abort_after_s`: seconds after its arrival, if at all."""

    prompt: tuple[int, ...]
    answer_tokens: int
    salt: str
    abort_after_s: float | None
    priority: int = 0


@dataclass(eq=False, slots=True)
class Asked:
    """A request that was made, and what has come of it."""

    id: int
    known: Known
    salt: str
    arrived_s: float
    abort_s: float | None
    priority: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def tokens(self) -> list[int]:
        """The answer so far."""
        return [token for chunk in self.chunks for token in chunk.token_ids]


class Requests:
    """Draws requests, one burst at a time."""

    def __init__(self, workload: Workload, seed: int, page_size: int) -> None:
        self._workload = workload
        self._page = page_size
        self._random = random.Random(f"hicache requests {seed}")
        self._documents = [self._tokens(workload.prompt_tokens) for _ in range(workload.documents)]
        self._talks: list[tuple[int, ...]] = []
        self._made = 0
        self.next_s = 0.0

    @property
    def ended(self) -> bool:
        """Whether no more will come."""
        return self._workload.stop is not None and self._made >= self._workload.stop

    def burst(self) -> list[Draft]:
        """The requests that arrive at `next_s`; then it is the time of the next burst."""
        self.next_s += self._random.expovariate(1 / self._workload.gap_s)
        count = self._random.randint(1, self._workload.burst)
        if self._workload.stop is not None:
            count = min(count, self._workload.stop - self._made)
        priority = self._priority()
        return [self._draft(priority) for _ in range(count)]

    def _priority(self) -> int:
        """That of a burst."""
        if not self._workload.urgent or self._random.random() >= self._workload.urgent:
            return 0
        return self._random.choice([-1, 1, 1, 2])

    def answered(self, tokens: Sequence[int]) -> None:
        """A prompt with its answer, which somebody may go on from."""
        if self._workload.turns:
            self._talks.append(tuple(tokens))
            del self._talks[:-16]

    def _draft(self, priority: int) -> Draft:
        self._made += 1
        workload, source = self._workload, self._random
        salt = f"tenant {self._made}" if not workload.salts else f"tenant {source.randrange(workload.salts)}"
        aborted = source.random() < workload.aborts
        return Draft(
            tuple(self._prompt()),
            source.choice([1, 2, workload.answer_tokens // 2 or 1, workload.answer_tokens]),
            salt,
            source.expovariate(1 / (4 * workload.gap_s)) if aborted else None,
            priority,
        )

    def _prompt(self) -> list[int]:
        """An earlier talk or a part of a document, and something new; often as long as whole pages, or nearly."""
        source, most = self._random, self._workload.prompt_tokens
        talks = [talk for talk in self._talks if len(talk) < most]
        if talks and source.random() < self._workload.turns:
            head = list(source.choice(talks))
        else:
            head = list(source.choice(self._documents)[: source.randrange(most)])
        whole = head + self._tokens(source.randint(1, max(1, most // 6)))
        length = len(whole)
        if source.random() < 0.4:
            length = length // self._page * self._page + source.choice([-1, 0, 1])
        elif source.random() < 0.1:
            length = source.choice([1, 2])
        return whole[: min(max(1, length), most)]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]
