"""After an error the store stops writing for a while, says so, and tries again by itself."""

import errno
import logging
import threading
from collections.abc import Callable

_LOG = logging.getLogger(__name__)


class Trouble:
    """What is wrong with a store now. Thread-safe; `clock_s` gives seconds that never go back."""

    def __init__(self, name: str, retry_s: float, clock_s: Callable[[], float]) -> None:
        self._name = name
        self._retry_s = retry_s
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._write_error: str | None = None
        self._paused_until_s = 0.0
        self._read_error: str | None = None
        self._read_error_until_s = 0.0

    def pause(self, error: OSError) -> None:
        """A write failed: none is tried until `retry_s` have passed."""
        with self._lock:
            if self._write_error is None:
                _LOG.warning("%s: writing failed, paused: %s", self._name, _describe(error))
            self._write_error = _describe(error)
            self._paused_until_s = self._clock_s() + self._retry_s

    def resume(self) -> None:
        """A write succeeded."""
        with self._lock:
            if self._write_error is not None and self._clock_s() >= self._paused_until_s:
                _LOG.warning("%s: writing works again", self._name)
                self._write_error = None

    def is_paused(self) -> bool:
        """Whether writes are to be left alone for now."""
        with self._lock:
            return self._write_error is not None and self._clock_s() < self._paused_until_s

    def read_failed(self, error: OSError) -> None:
        """Reading or removing failed: shown for `retry_s`."""
        with self._lock:
            self._read_error = _describe(error)
            self._read_error_until_s = self._clock_s() + self._retry_s

    def health(self) -> tuple[str, ...]:
        """One sentence for each thing that is wrong now."""
        with self._lock:
            now_s = self._clock_s()
            wrong = []
            if self._write_error is not None:
                left_s = max(0.0, self._paused_until_s - now_s)
                wrong.append(f"{self._name}: writing is paused: {self._write_error}; next try in {left_s:.0f} s")
            if self._read_error is not None and now_s < self._read_error_until_s:
                wrong.append(f"{self._name}: reading failed: {self._read_error}")
            return tuple(wrong)


def _describe(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0)
    return f"{error.strerror} ({code})" if code else str(error)
