"""What goes into the engine and what comes out of it: frozen values, without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hicache.errors import ConfigError

MOST_PRIORITY = 100
"""The highest priority a request can have; the lowest is as far below 0."""

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


def _require(holds: bool, name: str, value: object, right: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value}: it must be {right}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.

    One seed gives the same tokens for the same prompt whatever else runs; None takes a random one. Raises ConfigError
    for a value out of range.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _require(0.0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 or more")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "between 0 and 1")
        _require(all(self.stop), "stop", self.stop, "without empty strings")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a request does with cached pages. Without `read` it computes all; without `write` it leaves nothing behind.

    `priority` and `ttl_s` (seconds) say how long its pages stay under the eviction policy `priority`; None: as long as
    its turn in the queue says, and without end. Raises ConfigError for a value that is out of bounds.
    """

    read: bool = True
    write: bool = True
    priority: int | None = None
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        right = f"from {-MOST_PRIORITY} to {MOST_PRIORITY}"
        _require(-MOST_PRIORITY <= (self.priority or 0) <= MOST_PRIORITY, "cache.priority", self.priority, right)
        _require(self.ttl_s is None or 0 < self.ttl_s < float("inf"), "cache.ttl", self.ttl_s, "seconds, above 0")


CACHED = CacheUse()
"""What requests do that say nothing."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt and how it is to be answered. `tenant` and `salt` keep its pages apart from those of others.

    A higher `priority` goes first; `cache` says what it does with cached pages. Raises ConfigError for a priority
    beyond MOST_PRIORITY, above or below 0.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    salt: str = ""
    priority: int = 0
    tenant: str = ""
    cache: CacheUse = CACHED

    def __post_init__(self) -> None:
        right = f"from {-MOST_PRIORITY} to {MOST_PRIORITY}"
        _require(-MOST_PRIORITY <= self.priority <= MOST_PRIORITY, "priority", self.priority, right)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` has `device`, `host` and `storage`, together at most the prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer. `text` may lag behind `token_ids` while a character or a stop string is incomplete.

    Only the last chunk has a finish reason and a usage; `error` comes with the reason "error". `ttft_s` is on the
    chunk of the first token: seconds since the request was submitted.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
    ttft_s: float | None = None
