"""A store that keeps failing, or does not come back, is left alone for a while; then one call finds out how it is."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """What becomes of a call."""

    CLOSED = "closed"
    """It goes to the store."""
    HALF_OPEN = "half-open"
    """The pause is over: the next one goes to the store, and decides for all others."""
    OPEN = "open"
    """It is answered at once, with no."""


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """`failures` in a row open a breaker, or one call that takes longer than `slow_s`; for `pause_s` seconds then."""

    failures: int = 5
    slow_s: float = 5.0
    pause_s: float = 10.0


@dataclass(frozen=True, slots=True)
class BreakerStats:
    """The state now; how often it opened, and how many calls were answered without the store."""

    state: BreakerState = BreakerState.CLOSED
    opened: int = 0
    refused_calls: int = 0


@dataclass(eq=False, slots=True)
class Call:
    """A call that is inside the store. `ok`: what whoever made it says of its outcome."""

    since_s: float
    ok: bool = False
    late: bool = False


class Breaker:
    """Closed, open, half-open. Thread-safe; `clock_s` gives seconds that never go back.

    While a call is late it stays open: so no more threads get stuck in a store than are inside it when it gets stuck.
    """

    def __init__(self, options: BreakerOptions, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._inside: list[Call] = []
        self._probe: Call | None = None
        self._failed = 0
        self._open_until_s: float | None = None
        self._opened = 0
        self._refused = 0

    @contextmanager
    def call(self) -> Iterator[Call | None]:
        """`with breaker.call() as call`: None is to be answered without the store. Set `ok` when all went well."""
        call = self._enter()
        try:
            yield call
        finally:
            if call is not None:
                self._leave(call)

    @property
    def refuses(self) -> bool:
        """Whether a call would be answered without the store now."""
        with self._lock:
            return self._refuses()

    def stats(self) -> BreakerStats:
        """The numbers now."""
        with self._lock:
            return BreakerStats(self._state(), self._opened, self._refused)

    def _enter(self) -> Call | None:
        with self._lock:
            if self._refuses():
                self._refused += 1
                return None
            call = Call(self._clock_s())
            if self._open_until_s is not None:
                self._probe = call
            self._inside.append(call)
            return call

    def _leave(self, call: Call) -> None:
        with self._lock:
            self._look()
            self._inside.remove(call)
            if call is self._probe:
                self._probe = None
                self._settle_probe(call)
            elif call.late:
                self._pause()
            elif self._open_until_s is None:
                self._failed = 0 if call.ok else self._failed + 1
                if self._failed >= self._options.failures:
                    self._open()

    def _settle_probe(self, call: Call) -> None:
        if call.ok and not call.late:
            self._open_until_s = None
            self._failed = 0
        else:
            self._pause()

    def _look(self) -> None:
        """Calls that are inside for too long."""
        now_s = self._clock_s()
        for call in self._inside:
            if not call.late and now_s - call.since_s > self._options.slow_s:
                call.late = True
                if self._open_until_s is None:
                    self._open()

    def _open(self) -> None:
        self._opened += 1
        self._pause()

    def _pause(self) -> None:
        self._failed = 0
        self._open_until_s = self._clock_s() + self._options.pause_s

    def _state(self) -> BreakerState:
        self._look()
        if self._open_until_s is None:
            return BreakerState.CLOSED
        paused = self._clock_s() < self._open_until_s or any(call.late for call in self._inside)
        return BreakerState.OPEN if paused else BreakerState.HALF_OPEN

    def _refuses(self) -> bool:
        state = self._state()
        return state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and self._probe is not None)
