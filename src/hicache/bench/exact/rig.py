"""One subject over a cache with real pools and threads: prompts are computed piece by piece, or asked of the engine."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hicache.bench.exact.plan import PAGE
from hicache.bench.exact.subject import Subject
from hicache.builder import build_kv_cache
from hicache.cache import Match
from hicache.config import CacheConfig
from hicache.controller import Prefetch
from hicache.device.torch import RESERVED_SLOTS, TorchDevicePool
from hicache.engine.core import EngineCore
from hicache.engine.executor import Executor
from hicache.engine.request import Request
from hicache.engine.sequence import Sequence as Computation
from hicache.engine.types import Chunk, SamplingParams
from hicache.engine.work import CoreOptions
from hicache.keys import Namespace, page_keys
from hicache.layout import PoolGeometry
from hicache.storage import chain_keys
from hicache.units import HOLE, ByteArray, DeviceSlots, Int32Array, PoolName, Tier

PAGES = 400
MAX_RUNNING = 4
CHUNK_TOKENS = 16
_PATIENCE_S = 60.0
_SCRIBBLE = float("nan")
"""What device memory holds that nobody has loaded: whatever reads it is no number."""


class BrokenError(Exception):
    """Something that always works did not."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a resumed prompt reads of one pool: device slots, and their bytes [slots, slot_bytes]."""

    slots: DeviceSlots
    content: ByteArray


@dataclass(frozen=True, slots=True)
class Pass:
    """A prompt that was computed from token `start` on: its logits [tokens - start, vocabulary].

    `cached`: tokens that came from each tier. `held`: per pool what lay there before.
    """

    start: int
    logits: torch.Tensor
    cached: Mapping[str, int]
    held: Mapping[PoolName, Held]


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of an answer, and prompt tokens that came from each tier."""

    tokens: tuple[int, ...]
    cached: Mapping[str, int]


class _NoText:
    """Stands in for a tokenizer where only token ids matter."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return ""


class Rig:
    """A cache, an executor and a core over the subject's model. Close it, or use it as `with rigged(...)`."""

    def __init__(self, subject: Subject, store: Path | None = None) -> None:
        self.subject = subject
        self.pools: dict[PoolName, TorchDevicePool] = {}
        description = subject.description
        self.cache = build_kv_cache(
            description,
            CacheConfig(
                device_size=PAGES * description.slot_bytes,
                host_size=PAGES * description.slot_bytes,
                page_size=PAGE,
                window_ratio=1,
                checkpoint_share=0.5,
                storage_url=None if store is None else f"file:{store}",
            ),
            device_pool=self._device_pool,
            reserved_slots=RESERVED_SLOTS,
            live_slots=MAX_RUNNING,
        )
        self._executor = Executor(subject.model, description, self.pools, 512)
        self._core = EngineCore(self.cache, self._executor, CoreOptions(MAX_RUNNING, CHUNK_TOKENS))
        self._namespace = Namespace("tiny", "0", "float32", PAGE, description.fingerprint)
        self._ids = 0

    def compute(
        self,
        tokens: Sequence[int],
        cuts: Sequence[int] = (),
        *,
        snapshots: Sequence[int] = (),
        salt: str = "",
        keep: bool = False,
        stored: bool = False,
    ) -> Pass:
        """Resume a prompt where the cache has it, and compute the rest in chunks that end at `cuts` at the latest.

        Recurrent state is kept at `snapshots` too. What was computed goes into the tree with `keep` only. `salt` sets
        the prompt apart from equal ones; `stored`: what the store has is fetched first.
        """
        with self.begin(tokens, 1, salt=salt, snapshots=snapshots, stored=stored) as (computation, match):
            return self._compute(computation, match, [*cuts, len(tokens)], keep)

    @contextmanager
    def begin(
        self, tokens: Sequence[int], answer: int, *, salt: str, snapshots: Sequence[int] = (), stored: bool = False
    ) -> Iterator[tuple[Computation, Match]]:
        """A prompt that is matched, to be computed by whoever asked; it is released at the end. As `compute`."""
        request = self._request(tokens, answer, salt, lambda chunk: None)
        ticket = self._fetch(request) if stored else None
        match = self.cache.match_prefix(request.tokens(0, len(tokens)), request.namespace, ticket)
        computation = Computation(request, self.cache, match, self._executor, snapshots)
        try:
            yield computation, match
        finally:
            computation.release()
            self.settle()

    def run(self, computation: Computation, count: int) -> torch.Tensor:
        """The logits of its next `count` tokens, which have slots: float32 [count, vocabulary]."""
        segment = replace(computation.segment(count), logit_rows=count)
        return self._executor.run([segment], computation.wait)[0].logits

    def take(self, tier: Tier, leave: int = 0) -> Mapping[PoolName, Int32Array]:
        """All free slots of a tier, in every pool but `leave`, until `give`. Nothing is evicted."""
        group = self.cache.controller.mem_pool_host
        free = {pool: group.get_entry(pool).side(tier).available() for pool in self.cache.controller.state.pools}
        taken = group.reserve({pool: max(0, count - leave) for pool, count in free.items()}, tier)
        if taken is None:
            raise BrokenError(f"slots that are free in {tier.value} are not to be had")
        return taken.commit()

    def give(self, tier: Tier, slots: Mapping[PoolName, Int32Array]) -> None:
        """Give back slots that were taken."""
        state = self.cache.controller.state
        (state.free_device if tier is Tier.DEVICE else state.free_host)(slots)

    def ask(self, *prompts: Sequence[int], answer: int) -> list[Answer]:
        """Greedy answers of `answer` tokens to prompts that are asked at the same time."""
        heard: list[list[Chunk]] = []
        for prompt in prompts:
            heard.append([])
            self._core.add(self._request(prompt, answer, "", heard[-1].append))
        self.until(self._stepped_to_the_end)
        return [_answer(chunks) for chunks in heard]

    def evict(self, pool: PoolName, tier: Tier, count: int | None = None) -> int:
        """Evict `count` slots (all that may go by default) of one pool, written back before. Returns how many went."""
        side = self.cache.controller.mem_pool_host.get_entry(pool).side(tier)
        before = side.available()
        wanted = before + (side.evictable() if count is None else min(count, side.evictable()))

        def enough() -> bool:
            side.evict(wanted)
            return side.available() >= wanted and not self.cache.in_flight

        self.until(enough)
        return side.available() - before

    def empty(self, tier: Tier) -> None:
        """Evict everything from a tier; device memory is overwritten."""
        for pool in self.cache.controller.state.pools:
            self.evict(pool, tier)
        left = [pool for pool in self.cache.stats().pools if pool.tier is tier and pool.cached + pool.other]
        if left:
            raise BrokenError(f"{left[0].cached + left[0].other} slots of {left[0].pool!r} stay in {tier.value}")
        if tier is Tier.DEVICE:
            self._scribble()

    def hit(self, tokens: Sequence[int]) -> tuple[int, int]:
        """How many tokens of a prompt could be resumed on the device, and with what the host has."""
        match = self.cache.match_prefix(np.asarray(tokens, np.uint32), self._namespace)
        device = match.device_tokens
        usable = device + match.host_tokens
        self.cache.release(match)
        return device, usable

    def places(self, tokens: Sequence[int]) -> dict[tuple[PoolName, Tier], Int32Array]:
        """Per pool with slots of its own and tier of memory, the slots of a prompt's full pages; HOLE where none is."""
        state = self.cache.controller.state
        found = state.tree.match(self._namespace.fingerprint, _raw(tokens))
        places = {}
        for pool in state.pools:
            for tier in (Tier.DEVICE, Tier.HOST):
                run = np.full(len(tokens) // PAGE, HOLE, np.int32)
                run[: found.pages] = state.tree.slots(found, pool, tier, 0, found.pages)
                places[pool, tier] = run
        return places

    def content(self, pool: PoolName, tier: Tier, slots: Int32Array) -> ByteArray:
        """The bytes of some slots of a pool, and of those that live at its slots: [slots, bytes]."""
        state = self.cache.controller.state
        if tier is Tier.DEVICE:
            parts = [self.pools[member].stage(DeviceSlots(slots)) for member in state.members(pool)]
        else:
            parts = [state.group.get_pool(member).pages[slots] for member in state.members(pool)]
        return np.concatenate(parts, axis=1)

    def forget(self, pool: PoolName, page: int, tokens: Sequence[int]) -> int:
        """Remove a pool's part of one page of a prompt from the store. Returns how many values went."""
        store, namespace = self.cache.controller.storage, self._namespace.fingerprint
        if store is None:
            raise BrokenError("there is no store to remove anything from")
        keys = chain_keys(namespace, pool, namespace, page_keys(namespace, _raw(tokens), PAGE))
        return int(store.delete([keys[page]]).sum())

    def settle(self) -> None:
        """Wait until no transfer is in flight."""
        self.until(lambda: self.cache.in_flight == 0)

    def until(self, happened: Callable[[], bool]) -> None:
        """Poll until something has happened. Raises BrokenError when it does not."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            self.cache.poll()
            if happened():
                return
            if time.monotonic() > deadline_s:
                raise BrokenError(f"nothing has happened for {_PATIENCE_S:.0f} s")
            time.sleep(0.0002)

    def close(self) -> None:
        """Settle everything and give the memory back."""
        self._core.close()

    def _compute(self, computation: Computation, match: Match, stops: Sequence[int], keep: bool) -> Pass:
        self.until(partial(computation.start, 0.0))
        start = computation.computed
        logits: list[torch.Tensor] = []
        held: dict[PoolName, Held] = {}
        while computation.missing:
            stop = next(stop for stop in stops if stop > computation.computed)
            count = computation.chunk(stop - computation.computed)
            self.until(partial(computation.reserve, count))
            logits.append(self.run(computation, count))
            if not computation.settle():
                raise BrokenError(f"a load of {start} tokens came short")
            if not held:
                held = self._held(match, start)
            computation.advance(count)
            if keep:
                computation.share()
        return Pass(start, torch.cat(logits), match.cached_tokens, held)

    def _held(self, match: Match, tokens: int) -> dict[PoolName, Held]:
        found = {}
        for pool in self.subject.description.pools:
            source = pool.derived_from or pool.name
            needed = pool.coverage.required(tokens // PAGE, PAGE)
            slots = DeviceSlots(match.slots(source)[needed.start : needed.stop].copy())
            if (slots == HOLE).any():
                raise BrokenError(f"pool {pool.name!r} lacks pages of a hit of {tokens} tokens")
            found[pool.name] = Held(slots, self.pools[pool.name].stage(slots))
        return found

    def _fetch(self, request: Request) -> Prefetch:
        ticket = self.cache.prefetch(request.tokens(0, request.length), request.namespace)
        self.until(lambda: ticket.done)
        return ticket

    def _request(self, tokens: Sequence[int], answer: int, salt: str, emit: Callable[[Chunk], None]) -> Request:
        self._ids += 1
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        namespace = self._namespace.with_salt(salt) if salt else self._namespace
        return Request(self._ids, tokens, params, namespace, _NoText(), frozenset(), emit, 0.0)

    def _stepped_to_the_end(self) -> bool:
        self._core.step()
        return not self._core.has_work

    def _scribble(self) -> None:
        for pool in self.pools.values():
            for layer, tensors in enumerate(pool.geometry.layers):
                for part in range(len(tensors)):
                    pool.tensor(layer, part)[RESERVED_SLOTS:] = _SCRIBBLE

    def _device_pool(self, name: str, geometry: PoolGeometry, slots: int) -> TorchDevicePool:
        self.pools[name] = TorchDevicePool.page_first(name, geometry, slots)
        return self.pools[name]


@contextmanager
def rigged(subject: Subject, store: Path | None = None) -> Iterator[Rig]:
    """A rig that is closed at the end."""
    rig = Rig(subject, store)
    try:
        yield rig
    finally:
        rig.close()


def _raw(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.uint32).tobytes()


def _answer(chunks: Sequence[Chunk]) -> Answer:
    last = chunks[-1]
    if last.error is not None or last.usage is None:
        raise BrokenError(f"a request has failed: {last.error}")
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return Answer(tuple(tokens), dict(last.usage.cached_tokens))


def full_pages(tokens: int) -> int:
    """How many tokens of a prompt of `tokens` can come from a cache: full pages, and one token is left to compute."""
    return (tokens - 1) // PAGE * PAGE


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference as a part of the largest of `other`."""
    return float(np.float64((one - other).abs().max()) / np.float64(other.abs().max()))
