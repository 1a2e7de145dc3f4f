"""Whoever runs gets its slots in the end: later turns give way, with all that was computed where it can be kept."""

from collections.abc import Callable

from hicache.engine.lineup import Lineup
from hicache.engine.sequence import Sequence
from hicache.engine.work import CoreOptions, CoreStats

RETRACTION_PATIENCE_S = 1.0
"""How long a request waits for the slots of one that was retracted, before another gives way too."""

PATIENCE_STEPS = 3
"""How often a request is refused memory while transfers may free some, before another gives way."""


class Preemption:
    """Makes room for what runs, and for whoever has a higher priority. `transfers` counts those in flight."""

    def __init__(
        self,
        lineup: Lineup,
        options: CoreOptions,
        counts: CoreStats,
        clock: Callable[[], float],
        transfers: Callable[[], int],
    ) -> None:
        self._lineup = lineup
        self._options = options
        self._counts = counts
        self._clock = clock
        self._transfers = transfers
        self._retracted_s = clock()

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Slots for the sequence's next tokens. False: it waits, for others whose turn comes before its own, too."""
        while not sequence.reserve(tokens):
            if self.making_room():
                return False
            sequence.refusals += 1
            if self._transfers() and sequence.refusals <= PATIENCE_STEPS:
                return False
            if sequence.give_up_drafts() or self._lineup.stay():
                continue
            last = self._lineup.running[-1]
            if last is sequence or last.returning:
                return False
            self.preempt(last)
        sequence.refusals = 0
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Off the device until there is room again: with all that was computed, if it can be kept whole.

        Else back to its place in the queue; then what it has computed stays cached if there is room.
        """
        self._counts.preemptions += 1
        if self._options.retract and sequence.retract():
            self._lineup.remove(sequence)
            self._lineup.leave(sequence)
            self._retracted_s = self._clock()
            self._counts.retractions += 1
            return
        sequence.share()
        self._lineup.queue_again(sequence)

    def making_room(self) -> bool:
        """Whether a retracted request is about to leave its slots. One that takes too long is not waited for."""
        late = self._clock() - self._retracted_s > RETRACTION_PATIENCE_S
        return not late and any(sequence.leaving for sequence in self._lineup.away)
