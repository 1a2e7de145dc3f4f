"""Nobody starves: turns are fixed when requests come, nobody is let in before an earlier one, and the first goes on.

The turns are worked out here again, so that a scheduler which forgets that waiting counts is found out.
"""

from collections.abc import Iterable

from hicache.engine.lineup import Lineup
from hicache.simulate.broken import RuleError
from hicache.simulate.requests import Asked

PATIENCE_STEPS = 600
"""Steps without any transfer under way in which whoever is first gets no token: more than all prompts take."""


class Turns:
    """Watches a scheduler's lists. `ageing_s`: how long somebody has waited who is as good as one priority higher."""

    def __init__(self, lineup: Lineup, ageing_s: float) -> None:
        self._lineup = lineup
        self._ageing_s = ageing_s
        self._first: Asked | None = None
        self._ran = False
        self._chunks = 0
        self._quiet_steps = 0

    def turn(self, one: Asked) -> tuple[float, int]:
        """When it came, earlier for a priority."""
        return one.arrived_s - one.priority * self._ageing_s, one.id

    def check_admitted(self, one: Asked, unfinished: Iterable[Asked]) -> None:
        """`one` leaves the queue: nobody with an earlier turn may be away, or wait for anything but storage."""
        lineup = self._lineup
        held_up = {waiting.request.id for waiting in lineup.waiting if waiting.ready}
        held_up.update(sequence.request.id for sequence in lineup.away)
        passed = [other.id for other in unfinished if other.id in held_up and self.turn(other) < self.turn(one)]
        if passed:
            raise RuleError("turns", f"request {one.id} was let in before {passed}, whose turns come first")

    def check_step(self, unfinished: Iterable[Asked], *, quiet: bool) -> None:
        """After a step. `quiet`: no transfer was under way."""
        first = min(unfinished, key=self.turn, default=None)
        running = {sequence.request.id for sequence in self._lineup.running}
        runs = first is not None and first.id in running
        if first is not self._first:
            self._first, self._chunks, self._quiet_steps = first, 0, 0
        elif first is not None:
            if self._ran and not runs:
                raise RuleError("turns", f"request {first.id} had to give way, and its turn is the first of all")
            self._wait(first, quiet=quiet)
        self._ran = runs

    def _wait(self, first: Asked, *, quiet: bool) -> None:
        if len(first.chunks) > self._chunks:
            self._chunks, self._quiet_steps = len(first.chunks), 0
        self._quiet_steps += quiet
        if self._quiet_steps > PATIENCE_STEPS:
            raise RuleError(
                "turns", f"request {first.id}, whose turn is the first, got no token for {PATIENCE_STEPS} steps"
            )
