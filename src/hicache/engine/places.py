"""Requests that wait to be admitted are counted here, for every thread: never more than there are places."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hicache.errors import CapacityError, QueueFullError

_REMEMBERED = 64
"""Departures that the rate is measured over."""

MOST_WAIT_S = 60
"""The longest wait that a client is told."""


class Places:
    """`limit` places in the queue. A request takes one before it is queued and leaves it once."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._left_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._refused = 0

    @property
    def queued(self) -> int:
        """Places that are taken."""
        return len(self._held)

    @property
    def refused(self) -> int:
        """Requests that got no place."""
        return self._refused

    def take(self, requests: Sequence[int]) -> None:
        """Take a place for each, or for none of them.

        Raises QueueFullError when not so many are free, and CapacityError when there are not so many at all.
        """
        count = len(requests)
        with self._lock:
            if count > self._limit:
                raise CapacityError(
                    f"{count} prompts at once, and the queue holds {self._limit} in all; send them in smaller groups,"
                    " or raise max_waiting"
                )
            lacking = len(self._held) + count - self._limit
            if lacking > 0:
                self._refused += count
                wait_s = self._wait_s(lacking)
                raise QueueFullError(
                    f"{len(self._held)} requests wait, and the queue holds {self._limit}, too few for {count} more;"
                    f" ask again in {wait_s} s",
                    wait_s,
                )
            self._held.update(requests)

    def leave(self, request: int) -> None:
        """The request no longer waits. Harmless when it has left already."""
        with self._lock:
            if request in self._held:
                self._held.remove(request)
                self._left_s.append(self._clock())

    def _wait_s(self, places: int) -> int:
        """How long it takes until so many leave, at the rate at which they left lately; 1 to MOST_WAIT_S."""
        if not self._left_s:
            return MOST_WAIT_S
        per_place_s = (self._clock() - self._left_s[0]) / len(self._left_s)
        return min(MOST_WAIT_S, max(1, math.ceil(places * per_place_s)))
