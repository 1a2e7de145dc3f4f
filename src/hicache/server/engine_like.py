"""What the server needs of an engine, and nothing more: tests serve a scripted one through the same door."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from hicache.cache import CacheStats
from hicache.engine.types import Ask, Chunk


class TokenizerLike(Protocol):
    """The part of a transformers tokenizer that turns requests into token ids."""

    @property
    def chat_template(self) -> str | None: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def __len__(self) -> int: ...


class StreamLike(Protocol):
    """One answer while it is made. The last chunk, and only that one, has a finish reason."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    def abort(self) -> None:
        """Stop the work. Harmless when it has ended already."""
        ...


class CoreCounts(Protocol):
    """Counts since the start, and how many requests run and wait now."""

    @property
    def steps(self) -> int: ...

    @property
    def prefill_tokens(self) -> int: ...

    @property
    def decode_tokens(self) -> int: ...

    @property
    def drafted_tokens(self) -> int: ...

    @property
    def accepted_tokens(self) -> int: ...

    @property
    def preemptions(self) -> int: ...

    @property
    def retractions(self) -> int: ...

    @property
    def retracted(self) -> int: ...

    @property
    def void_steps(self) -> int: ...

    @property
    def failed_requests(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...


class StatsLike(Protocol):
    """The numbers of an engine and its cache, taken together."""

    @property
    def core(self) -> CoreCounts: ...

    @property
    def cache(self) -> CacheStats: ...

    @property
    def queued(self) -> int:
        """Requests that were submitted and not admitted so far."""
        ...

    @property
    def refused(self) -> int:
        """Requests that were told to ask again later."""
        ...


class EngineLike(Protocol):
    """A thread-safe door to the engine."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int:
        """The most tokens prompt and answer can have together."""
        ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    def check(self, ask: Ask) -> None:
        """Raise ConfigError or CapacityError for what can never be answered."""
        ...

    def submit_all(self, asks: Sequence[Ask]) -> Sequence[StreamLike]:
        """Start all of them, or raise: as `check`, QueueFullError when too many wait, ClosedError at the end."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it can still answer requests."""
        ...

    def health(self) -> tuple[str, ...]:
        """What is degraded, a line each; empty when all is well."""
        ...

    def stats(self) -> StatsLike: ...

    def close(self) -> None: ...
