"""Computation that has not passed yet is known, so that a copy begun later can wait for the pages it reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from hicache.transfer.messages import Event


@dataclass(frozen=True, slots=True)
class AllOf:
    """Passed once every one of some events has."""

    events: Sequence[Event]

    def query(self) -> bool:
        """Whether all have passed. Never blocks."""
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        """Wait for each."""
        for event in self.events:
            event.wait()


class Computing:
    """The events of the computation that wrote pages in the tree."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def add(self, event: Event | None) -> None:
        """Pages were inserted that are there once `event` has passed; at once if None."""
        if event is not None:
            self._prune()
            self._events.append(event)

    def all(self) -> Event | None:
        """What a copy of any page waits for; None if nothing."""
        self._prune()
        return AllOf(tuple(self._events)) if self._events else None

    def _prune(self) -> None:
        self._events = [event for event in self._events if not event.query()]
