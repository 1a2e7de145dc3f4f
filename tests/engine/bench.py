"""A core that the test steps itself: no thread, any transfer executor, any sizes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hicache.builder import ModelDescription, build_kv_cache, full_attention
from hicache.config import CacheConfig
from hicache.device.torch import RESERVED_SLOTS, TorchDevicePool
from hicache.engine import Chunk, SamplingParams
from hicache.engine.core import EngineCore
from hicache.engine.drafts import DraftPlan
from hicache.engine.executor import Executor
from hicache.engine.model import CausalModel
from hicache.engine.request import Request
from hicache.engine.speculation import Drafter
from hicache.engine.work import CoreOptions
from hicache.keys import Namespace
from hicache.layout import PoolGeometry
from hicache.storage import PageStore, StorageBackend
from hicache.transfer import Executor as TransferExecutor
from tests.engine.tiny import EOS, LAYERS, PAGE

MODEL = full_attention(LAYERS, kv_heads=2, head_dim=16, dtype="float32", page_size=PAGE)
NAMESPACE = Namespace(model="tiny", weights="0", dtype="float32", page_size=PAGE, geometry=MODEL.fingerprint)


class Letters:
    """A decoder for token ids as they are: one character each."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(0x4E00 + token) for token in token_ids)


@dataclass
class Answer:
    """What a request has shown so far."""

    id: int
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def reason(self) -> str | None:
        return self.chunks[-1].finish_reason if self.chunks else None

    @property
    def cached(self) -> dict[str, int]:
        usage = self.chunks[-1].usage
        assert usage is not None
        return dict(usage.cached_tokens)


class Bench:
    """A cache over torch pools and a core on top. `settings` are of the cache, and take the place of all others."""

    def __init__(
        self,
        model: CausalModel,
        description: ModelDescription = MODEL,
        *,
        device_pages: int = 200,
        host_pages: int = 400,
        options: CoreOptions | None = None,
        transfers: TransferExecutor | None = None,
        backend: StorageBackend | None = None,
        timeout_s: float = 10.0,
        write_policy: str = "write_through",
        pool: Callable[[str, PoolGeometry, int], TorchDevicePool] = TorchDevicePool.page_first,
        draft: DraftPlan | None = None,
        drafter: Drafter | None = None,
        settings: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pools: dict[str, TorchDevicePool] = {}
        options = options or CoreOptions(chunk_tokens=64)

        def device_pool(name: str, geometry: PoolGeometry, slots: int) -> TorchDevicePool:
            pools[name] = pool(name, geometry, slots)
            return pools[name]

        whole = description if draft is None else draft.description
        given: dict[str, Any] = {
            "device_size": (device_pages + RESERVED_SLOTS) * whole.slot_bytes,
            "host_size": host_pages * whole.slot_bytes,
            "page_size": PAGE,
            "transfer_timeout_s": timeout_s,
            "write_policy": write_policy,
        }
        config = CacheConfig(**{**given, **(settings or {})})
        self.cache = build_kv_cache(
            whole,
            config,
            device_pool=device_pool,
            reserved_slots=RESERVED_SLOTS,
            live_slots=options.max_running,
            executor=transfers,
            clock=clock,
        )
        if backend is not None:
            self.cache.attach_storage_backend(PageStore(backend))
        self.executor = Executor(model, description, pools, 1024)
        if draft is not None:
            drafter = draft.start(model, pools, 1024)
        self.drafter = drafter
        self.core = EngineCore(self.cache, self.executor, options, clock, drafter)
        self.namespace = replace(
            NAMESPACE,
            page_size=config.page_size,
            geometry=whole.fingerprint,
            draft_lookahead=whole.draft_lookahead,
        )
        self._next_id = 0
        self._threads = transfers is None

    def add(self, ids: Sequence[int], max_tokens: int = 8, salt: str = "", priority: int = 0, **params) -> Answer:
        answer = Answer(self._next_id)
        request = Request(
            answer.id,
            ids,
            SamplingParams(max_tokens=max_tokens, **params),
            self.namespace.with_salt(salt),
            Letters(),
            frozenset([EOS]),
            answer.chunks.append,
            submitted_s=0.0,
            priority=priority,
        )
        self._next_id += 1
        self.core.add(request)
        return answer

    def run(self, most_steps: int = 20_000) -> None:
        """Step until every request has ended."""
        for _ in range(most_steps):
            if not self.core.has_work:
                return
            if not self.core.step():
                self._give_way()
        raise AssertionError(f"still at work after {most_steps} steps: {self.core.stats()}")

    def ask(self, ids: Sequence[int], max_tokens: int = 8, **params) -> Answer:
        answer = self.add(ids, max_tokens, **params)
        self.run()
        return answer

    def settle_transfers(self) -> None:
        """Poll until no transfer is in flight, computing nothing."""
        for _ in range(200_000):
            if not self.core.transfers_in_flight:
                return
            self.cache.poll()
            self._give_way()
        raise AssertionError("transfers never settle")

    def settle(self) -> None:
        """Poll until no transfer is in flight."""
        for _ in range(200_000):
            if not self.core.transfers_in_flight:
                return
            self.core.step()
            self._give_way()
        raise AssertionError("transfers never settle")

    def _give_way(self) -> None:
        """Let the threads that copy have the interpreter, as an engine does that finds nothing to compute."""
        if self._threads:
            time.sleep(0.0001)

    def idle(self) -> None:
        """Raises unless nothing is held, pinned or in flight, and all sums match."""
        self.cache.audit()
        stats = self.cache.stats()
        assert (stats.pins, stats.open_matches, stats.in_flight) == (0, 0, 0)
        assert [pool.other for pool in stats.pools] == [0] * len(stats.pools)


def mixed_prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to 150 tokens that share prefixes of three documents."""
    random = np.random.default_rng(seed)
    documents = [random.integers(0, 250, 120).tolist() for _ in range(3)]
    prompts = []
    for _ in range(count):
        head = documents[random.integers(3)][: random.integers(0, 121)]
        prompts.append(head + random.integers(0, 250, random.integers(1, 31)).tolist())
    return prompts
