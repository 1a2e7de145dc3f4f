"""What the engine computes in a second, told to the cache: steps that compute prompts, with all they do."""

from hicache.cache import UnifiedRadixCache

WEIGHT = 0.2
"""Of the newest step, against all before it."""


class Pace:
    """A running mean of prompt tokens per second."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._cache = cache
        self._tokens_per_s: float | None = None

    def step(self, prefill_tokens: int, took_s: float) -> None:
        """A step has computed so many prompt tokens in `took_s` seconds."""
        if prefill_tokens == 0 or took_s <= 0:
            return
        new, before = prefill_tokens / took_s, self._tokens_per_s
        self._tokens_per_s = new if before is None else before + WEIGHT * (new - before)
        self._cache.tell_compute_rate(self._tokens_per_s)
