"""A call to an engine elsewhere ends within its time, and what went wrong last is said until something goes right."""

import logging
import threading
import time
from collections.abc import Callable

from hicache.errors import ConfigError
from hicache.storage.registry import StoreLocation

_LOG = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
"""How long one call of a backend may take when its URL has no `timeout`."""


class Deadline:
    """When a call has to be over. `clock_s` gives seconds that never go back."""

    def __init__(self, timeout_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._end_s = clock_s() + timeout_s

    def left_s(self) -> float:
        """Seconds that are left; TimeoutError when there are none."""
        left_s = self._end_s - self._clock_s()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        return left_s


class Outage:
    """Whether an engine answers, and if not, why. Thread-safe; says it in the log once per change."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._reason: str | None = None

    def note(self, reason: str | None) -> None:
        """What the last call met; None: it was answered."""
        with self._lock:
            before, self._reason = self._reason, reason
        if reason is not None and before is None:
            _LOG.warning("%s: %s", self._name, reason)
        elif reason is None and before is not None:
            _LOG.warning("%s: works again", self._name)

    def health(self) -> tuple[str, ...]:
        """One sentence when the last call was not answered."""
        with self._lock:
            return () if self._reason is None else (f"{self._name}: {self._reason}",)


def seconds_option(location: StoreLocation, name: str, default_s: float) -> float:
    """A time in seconds that a store's URL gives; ConfigError if it is none."""
    text = location.options.get(name)
    if text is None:
        return default_s
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"store option {name}={text!r}: give seconds, more than 0, as in {name}={default_s:g}")
    return value


def count_option(location: StoreLocation, name: str, default: int | None) -> int | None:
    """A whole number from 1 that a store's URL gives; ConfigError if it is none."""
    text = location.options.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"store option {name}={text!r}: give a whole number from 1")
    return int(text)


def yes_option(location: StoreLocation, name: str) -> bool:
    """Whether a store's URL says `name=yes`; not given: no. ConfigError for another word."""
    text = location.options.get(name, "no")
    if text not in ("yes", "no"):
        raise ConfigError(f"store option {name}={text!r}: say yes or no")
    return text == "yes"
