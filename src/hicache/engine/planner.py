"""A step is planned in turn: who decodes, then prompts; no load holds up what can be computed without it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hicache.engine.drafting import Drafting
from hicache.engine.intake import Intake
from hicache.engine.lineup import Lineup
from hicache.engine.preemption import Preemption
from hicache.engine.sequence import Sequence
from hicache.engine.work import Work


@dataclass(slots=True)
class _Step:
    """A step while it is planned: `budget` prompt tokens may be added. `short`: somebody was refused memory."""

    budget: int
    work: list[Work] = field(default_factory=list)
    short: bool = False

    def add(self, one: Work) -> None:
        self.work.append(one)
        self.budget -= one.tokens if one.tokens > 1 else 0


class Planner:
    """Decides what each step computes, with up to `chunk_tokens` tokens of prompts."""

    def __init__(
        self,
        lineup: Lineup,
        intake: Intake,
        preemption: Preemption,
        drafting: Drafting,
        chunk_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._lineup = lineup
        self._intake = intake
        self._preemption = preemption
        self._drafting = drafting
        self._chunk_tokens = chunk_tokens
        self._clock = clock

    def plan(self) -> list[Work]:
        """A token of each that decodes, and prompts in turn, up to the chunk's size.

        Whoever waits for a load joins when it has arrived; or when nothing else can be computed, to go on layer by
        layer as the load arrives.
        """
        step = _Step(self._chunk_tokens)
        for sequence in list(self._lineup.running):
            if sequence in self._lineup.running:  # else it gave way
                self._plan_one(sequence, step)
        while step.budget > 0 and not step.short:
            admitted = self._intake.admit()
            if admitted is None:
                break
            self._plan_one(admitted, step)
        if not step.short:
            self._intake.load_ahead(self._clock())
        if not step.work:
            self._plan_loading(step)
        return [one for one in step.work if one.sequence in self._lineup.running]

    def _plan_one(self, sequence: Sequence, step: _Step) -> None:
        if not sequence.start(self._clock()):
            step.short = True
        elif not sequence.loading:
            self._plan_part(sequence, step)

    def _plan_loading(self, step: _Step) -> None:
        for sequence in [one for one in self._lineup.running if one.loading]:
            if step.work or sequence not in self._lineup.running:
                return
            self._plan_part(sequence, step)

    def _plan_part(self, sequence: Sequence, step: _Step) -> None:
        if sequence.missing > 1 and step.budget <= 0:
            return
        room = self._drafting.room(sequence)
        while room and not sequence.reserve(1 + room):
            room //= 2
        if room:
            sequence.refusals = 0
            step.add(Work(sequence, 1, room))
            return
        tokens = sequence.chunk(step.budget)
        if self._preemption.reserve(sequence, tokens):
            step.add(Work(sequence, tokens))
        else:
            step.short = True
