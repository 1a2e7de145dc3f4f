"""Closing waits until every call that is inside has left; nothing enters afterwards."""

import threading
from types import TracebackType

from hicache.errors import ClosedError


class Gate:
    """`with gate:` around each call; `close()` once. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise ClosedError(f"{self._name} is closed; open it again to use it")
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self) -> bool:
        """Waits for the calls inside; True for the one call that closes, False if it was closed before."""
        with self._changed:
            first = not self._closed
            self._closed = True
            self._changed.wait_for(lambda: self._inside == 0)
            return first
