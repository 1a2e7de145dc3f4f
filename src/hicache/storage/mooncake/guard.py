"""A native call that does not come back in time is left to a thread of its own; it must touch no lent memory."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from hicache.storage.remote import Deadline

T = TypeVar("T")

_MOST_LEFT = 4
"""Calls that may be stuck at a time before new ones are refused at once."""


class Guard:
    """Runs calls that have no time limit of their own. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = 0

    def call(self, call: Callable[[], T], deadline: Deadline) -> T:
        """What the call returns or raises; TimeoutError when the deadline comes first."""
        answers: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()
        with self._lock:
            if self._left >= _MOST_LEFT:
                raise TimeoutError("does not answer: earlier calls are still waiting")
            self._left += 1

        def run() -> None:
            answer: tuple[T | None, Exception | None]
            try:
                answer = call(), None
            except Exception as error:  # noqa: BLE001 - it is raised again where the caller waits
                answer = None, error
            with self._lock:
                self._left -= 1
            answers.put(answer)

        # A daemon: a call that is stuck does not keep the process from ending.
        threading.Thread(target=run, name="hicache-guard", daemon=True).start()
        try:
            value, error = answers.get(timeout=deadline.left_s())
        except Empty:
            raise TimeoutError("does not answer in time") from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]
