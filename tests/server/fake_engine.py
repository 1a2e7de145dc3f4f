"""A scripted engine: the answer to a prompt is its own bytes, upper case, one token per byte."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from jinja2.exceptions import TemplateError

from hicache.cache import CacheStats, PoolStats
from hicache.engine.types import Ask, Chunk, FinishReason, SamplingParams, Usage
from hicache.pools import GroupCounts, PoolCounts
from hicache.storage import PageStoreStats
from hicache.units import Tier

BOS = 256
VOCABULARY = 300


@dataclass(frozen=True)
class Core:
    """Numbers, each another one."""

    steps: int = 31
    prefill_tokens: int = 32
    decode_tokens: int = 33
    preemptions: int = 34
    retractions: int = 46
    retracted: int = 47
    drafted_tokens: int = 45
    accepted_tokens: int = 44
    void_steps: int = 35
    failed_requests: int = 36
    running: int = 37
    waiting: int = 38


@dataclass(frozen=True)
class Stats:
    """What `FakeEngine.stats` gives."""

    core: Core
    cache: CacheStats
    queued: int = 48
    refused: int = 49


CACHE_STATS = CacheStats(
    pools=(
        PoolStats("kv", Tier.DEVICE, slots=10, slot_bytes=64, free=5, cached=3, other=2),
        PoolStats("kv", Tier.HOST, slots=20, slot_bytes=64, free=20, cached=0, other=0),
    ),
    lookup_tokens=100,
    hit_tokens={Tier.DEVICE: 40, Tier.HOST: 7, Tier.STORAGE: 0},
    in_flight=4,
    open_matches=2,
    pins=6,
    counters={
        "lookup_tokens": 100,
        "hit_tokens_host": 7,
        "kv_hit_without_state": 12,
        "load_pages": 9,
        "load_failed": 1,
        "dropped_pages": 0,
    },
    storage=PageStoreStats(read_pages=11, read_bytes=704, damaged_pages=1),
    group=GroupCounts((PoolCounts("kv", Tier.HOST, 48, 49, 50, 51),), 52, 53),
)
STATS = Stats(Core(), CACHE_STATS)


class FakeTokenizer:
    """A token per byte; 256 begins a text."""

    def __init__(self, chat_template: str | None = "plain") -> None:
        self.chat_template = chat_template
        self.begins = True

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        if conversation[0]["role"] == "assistant":
            raise TemplateError("the first turn must not be the assistant's")
        return "".join(f"{turn['role']}:{turn['content']};" for turn in conversation)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * (add_special_tokens and self.begins) + list(text.encode())

    def __len__(self) -> int:
        return VOCABULARY


class FakeStream:
    """Echoes the prompt. `gate` holds it back before its second token until it is set."""

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams, gate: threading.Event, cached: int) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.params = params
        self.priority = 0
        self.aborted = threading.Event()
        self.finished = False
        self._gate = gate
        self._cached = cached

    def abort(self) -> None:
        if not self.finished:
            self.aborted.set()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        text = "".join(chr(token) for token in self.prompt_ids if token < 128).upper()
        tokens = text[: self.params.max_tokens]
        for stop in self.params.stop:
            tokens = tokens.partition(stop)[0]
        reason: FinishReason = "length" if len(tokens) == self.params.max_tokens else "stop"
        yield Chunk(text=tokens[:1], token_ids=(1,), finish_reason=None, usage=None, error=None, ttft_s=0.02)
        while not self._gate.is_set():
            await asyncio.sleep(0.002)
        for letter in tokens[1:]:
            await asyncio.sleep(0)
            yield Chunk(text=letter, token_ids=(1,), finish_reason=None, usage=None, error=None, ttft_s=None)
        yield self._last(reason, len(tokens))
        self.finished = True

    def _last(self, reason: FinishReason, completion_tokens: int) -> Chunk:
        cached = {"device": self._cached, "host": 0, "storage": 0}
        usage = Usage(len(self.prompt_ids), completion_tokens, cached)
        return Chunk(text="", token_ids=(), finish_reason=reason, usage=usage, error=None, ttft_s=None)


class FailingStream(FakeStream):
    """Gives one token, and then the engine has failed."""

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        yield Chunk(text="x", token_ids=(1,), finish_reason=None, usage=None, error=None, ttft_s=0.02)
        yield Chunk(text="", token_ids=(), finish_reason="error", usage=None, error="the layers fell over", ttft_s=None)


class FakeEngine:
    """Remembers what was submitted. A prompt seen before counts as cached on the device but for its last token."""

    model_name = "org/fake"
    max_model_len = 200

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.closed = 0
        self.reset()

    def reset(self) -> None:
        """As new, but for `closed`."""
        self.tokenizer.chat_template = "plain"
        self.tokenizer.begins = True
        self.streams: list[FakeStream] = []
        self.gate = threading.Event()
        self.gate.set()
        self.degraded: tuple[str, ...] = ()
        self.alive = True
        self.refusal: Exception | None = None
        self.refusals: dict[tuple[int, ...], Exception] = {}
        self.stream_class: type[FakeStream] = FakeStream
        self._seen: set[tuple[int, ...]] = set()

    def check(self, ask: Ask) -> None:
        for refused, refusal in self.refusals.items():
            if refused == tuple(ask.prompt_ids):
                raise refusal

    def submit_all(self, asks: Sequence[Ask]) -> list[FakeStream]:
        if self.refusal is not None:
            raise self.refusal
        return [self._start(ask) for ask in asks]

    def _start(self, ask: Ask) -> FakeStream:
        prompt = tuple(ask.prompt_ids)
        stream = self.stream_class(prompt, ask.params, self.gate, len(prompt) - 1 if prompt in self._seen else 0)
        stream.priority = ask.priority
        self._seen.add(prompt)
        self.streams.append(stream)
        return stream

    def health(self) -> tuple[str, ...]:
        return self.degraded

    def stats(self) -> Stats:
        return STATS

    def close(self) -> None:
        self.closed += 1


def wait_until(condition, timeout_s: float = 10.0) -> None:
    """Poll until `condition()` holds; an AssertionError after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)
