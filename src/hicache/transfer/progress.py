"""How far a load has come: layers arrive in order, and a waiter never hangs on a load that failed."""

import threading


class LayerProgress:
    """Set by the worker that loads, waited for by the thread that computes."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._arrived = 0
        self._ended = False
        self.ran_ahead = False
        """Whether somebody went on without a layer that had not arrived. Set and read on the owner's thread."""
        self.void = False
        """Whether that happened on any rank, as all ranks agree. Set and read on the owner's thread."""
        self._condition = threading.Condition()

    @property
    def ended(self) -> bool:
        """Whether the load has ended, well or not, and its completion can be polled."""
        return self._ended

    def arrive(self, layer: int) -> None:
        """Layers up to and including `layer` are on the device."""
        with self._condition:
            self._arrived = max(self._arrived, layer + 1)
            self._condition.notify_all()

    def end(self) -> None:
        """The load has ended and its completion can be polled. Nobody waits any longer."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def wait(self, layer: int, timeout_s: float | None = None) -> bool:
        """Block until `layer` (or the last) has arrived or the load has ended. False if `timeout_s` passed first."""
        needed = min(layer + 1, self._layers)
        if self._arrived >= needed:
            return True
        with self._condition:
            return self._condition.wait_for(lambda: self._arrived >= needed or self._ended, timeout_s)

    def wait_end(self, timeout_s: float | None = None) -> bool:
        """Block until the load has ended. False if `timeout_s` passed first."""
        with self._condition:
            return self._condition.wait_for(lambda: self._ended, timeout_s)
