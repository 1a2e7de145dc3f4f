"""How long a request waits for storage: a deadline always, and by price no longer than computing would take."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

PrefetchPolicy: TypeAlias = Literal["best_effort", "wait_complete", "timeout", "cost-aware"]


@dataclass(frozen=True, slots=True)
class Patience:
    """A policy with its times, in seconds: `timeout_s` and `page_timeout_s` per page asked for; never above `most_s`.

    `wait_complete` waits `most_s`; `best_effort` not at all, though what was begun goes on for as long as `timeout`.
    """

    policy: PrefetchPolicy = "timeout"
    timeout_s: float = 10.0
    page_timeout_s: float = 0.0
    most_s: float = 60.0

    @property
    def waits(self) -> bool:
        """Whether a request waits for its pages at all."""
        return self.policy != "best_effort"

    def limit_s(self, pages: int) -> float:
        """The longest that anything is done for a prompt of which `pages` pages are asked for."""
        if self.policy == "wait_complete":
            return self.most_s
        return min(self.timeout_s + pages * self.page_timeout_s, self.most_s)


@dataclass(frozen=True, slots=True)
class Prices:
    """What bytes from storage and tokens computed take; None: not known. `latency_s`: until storage answers."""

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    tokens_per_s: float | None = None

    def fetch_s(self, size_bytes: int) -> float | None:
        """How long storage is expected to take for so many bytes, those that others wait for included."""
        if self.bytes_per_s is None:
            return None
        return self.latency_s + size_bytes / self.bytes_per_s if self.bytes_per_s > 0 else float("inf")

    def compute_s(self, tokens: int) -> float | None:
        """How long the engine is expected to compute."""
        return None if self.tokens_per_s is None else tokens / self.tokens_per_s


def patience_s(prices: Prices, tokens: int, size_bytes: int) -> float | None:
    """How long to wait for `tokens` tokens that lie behind `size_bytes` bytes. None: for as long as is allowed.

    0 where computing is expected to be quicker. Else as long as computing takes: whoever is wrong about the store
    then loses no more than that once. Without the engine's rate there is nothing to compare with.
    """
    compute_s, fetch_s = prices.compute_s(tokens), prices.fetch_s(size_bytes)
    if compute_s is None:
        return None
    return compute_s if fetch_s is None or fetch_s <= compute_s else 0.0
