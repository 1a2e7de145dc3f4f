"""How fast a store is, as its owner sees it: measured by the fetches themselves, on the time that ranks agree on."""

from hicache.controller.patience import Prices

WEIGHT = 0.3
"""Of a new measurement, against all before it."""

SAMPLE_S = 0.1
"""A rate is measured over so many seconds in which the store was busy, or until nothing is left to do."""

MEMORY_S = 60.0
"""What was measured longer ago is forgotten, so that a store that was slow is tried again."""


class StoreRates:
    """Bytes per second while fetches are under way, and seconds until a question is answered."""

    def __init__(self) -> None:
        self.waiting_bytes = 0
        """Of the fetches under way."""
        self._fetches = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._moved_bytes = 0
        self._bytes_per_s: float | None = None
        self._latency_s: float | None = None
        self._measured_s = 0.0

    def answered(self, took_s: float) -> None:
        """A question was answered after `took_s` seconds."""
        self._latency_s = _blend(self._latency_s, took_s)

    def began(self, size_bytes: int, now_s: float) -> None:
        """A fetch is under way."""
        if self._fetches == 0:
            self._measure()
            self._since_s = now_s
        self._fetches += 1
        self.waiting_bytes += size_bytes

    def ended(self, size_bytes: int, good_bytes: int, now_s: float) -> None:
        """A fetch has ended, with `good_bytes` of its `size_bytes`."""
        if now_s > self._since_s:
            self._measure()
        self._fetches -= 1
        self.waiting_bytes -= size_bytes
        self._busy_s += now_s - self._since_s
        self._moved_bytes += good_bytes
        self._since_s = now_s

    def prices(self, now_s: float, tokens_per_s: float | None) -> Prices:
        """What is known now."""
        self._measure()
        fresh = now_s - self._measured_s <= MEMORY_S
        return Prices(self._latency_s or 0.0, self._bytes_per_s if fresh else None, tokens_per_s)

    def _measure(self) -> None:
        """Make a measurement of what has ended: several may have at one time, and count together."""
        if self._busy_s > 0 and (self._fetches == 0 or self._busy_s >= SAMPLE_S):
            self._bytes_per_s = _blend(self._bytes_per_s, self._moved_bytes / self._busy_s)
            self._busy_s, self._moved_bytes, self._measured_s = 0.0, 0, self._since_s


def _blend(before: float | None, new: float) -> float:
    return new if before is None else before + WEIGHT * (new - before)
