"""Every unfinished request is in exactly one of three lists, each in the order of turns: earlier turns go first."""

import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from hicache.controller import Prefetch
from hicache.engine.request import Request
from hicache.engine.sequence import Sequence


@dataclass(eq=False, slots=True)
class Waiting:
    """A request in the queue, and what storage is asked for it. `ahead`: it does not run, but its load has begun.

    `looked_s`: when it was last looked whether there is something to load.
    """

    request: Request
    ticket: Prefetch | None
    ahead: Sequence | None = None
    looked_s: float = -math.inf

    @property
    def ready(self) -> bool:
        """Whether waiting longer brings no more of its prompt from storage."""
        return self.ticket is None or self.ticket.done

    def stay(self) -> None:
        """Give back what was loaded ahead, if it was."""
        if self.ahead is not None:
            self.ahead.release()
            self.ahead = None


def _turn(one: Waiting | Sequence) -> tuple[float, int]:
    return one.request.turn


class Lineup:
    """Who waits, who runs, and who was retracted.

    A request's turn is when it came; `ageing_s` seconds earlier for each step of priority, later below 0. So priority
    goes before age, and whoever waits is overtaken by nobody in the end.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._came = 0
        self.waiting: list[Waiting] = []
        self.running: list[Sequence] = []
        self.away: list[Sequence] = []

    def come(self, request: Request, now_s: float) -> None:
        """Fix the turn of a request that has just come."""
        self._came += 1
        request.turn = (now_s - request.priority * self._ageing_s, self._came)

    def wait(self, waiting: Waiting) -> None:
        """Into the queue, where its turn says."""
        insort(self.waiting, waiting, key=_turn)

    def run(self, sequence: Sequence) -> None:
        """Among those that run, where its turn says."""
        insort(self.running, sequence, key=_turn)

    def leave(self, sequence: Sequence) -> None:
        """Among those that were retracted, where its turn says."""
        insort(self.away, sequence, key=_turn)

    def remove(self, sequence: Sequence) -> None:
        """It neither runs nor is away any more."""
        (self.running if sequence in self.running else self.away).remove(sequence)

    def queue_again(self, sequence: Sequence) -> None:
        """Back to its place in the queue, with nothing but the tokens that it has."""
        self.remove(sequence)
        sequence.release()
        self.wait(Waiting(sequence.request, None))

    def next(self) -> Waiting | Sequence | None:
        """Whose turn it is of those that don't run: of the queue only who is ready."""
        ready = next((one for one in self.waiting if one.ready), None)
        if self.away and (ready is None or _turn(self.away[0]) < _turn(ready)):
            return self.away[0]
        return ready

    def lower(self, request: Request) -> list[Sequence]:
        """Those that run, have a lower priority than `request` and a later turn; who gives way first is the last."""
        return [
            one for one in self.running if one.request.priority < request.priority and one.request.turn > request.turn
        ]

    def stay(self) -> bool:
        """Give back what was loaded ahead for the last of those for whom something was. False when there is none."""
        for waiting in reversed(self.waiting):
            if waiting.ahead is not None:
                waiting.stay()
                return True
        return False

    def everyone(self) -> Iterator[Request]:
        """All requests."""
        yield from (one.request for one in self.waiting)
        yield from (one.request for one in (*self.away, *self.running))
