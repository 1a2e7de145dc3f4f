"""A small engine that computes fake bytes: every page's content follows from its tokens, so any mix-up shows."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hicache.builder import DevicePoolFactory, ModelDescription, PoolDescription, build_kv_cache
from hicache.cache import Load, Match, UnifiedRadixCache
from hicache.config import CacheConfig
from hicache.controller import Agree, Prefetch
from hicache.coverage import Checkpoint, Window
from hicache.device.array import ArrayDevicePool
from hicache.keys import Namespace
from hicache.layout import PoolGeometry, TensorSpec
from hicache.storage import PageStore
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.tree import EvictionPolicy
from hicache.units import HOLE, ByteArray, DeviceSlots, HostSlots, Tier

PAGE = 4
LAYERS = 3


def geometry(layers: int, size: int, tokens: int = PAGE) -> PoolGeometry:
    """`layers` layers of one tensor of `size` bytes per token."""
    return PoolGeometry.uniform(layers, (TensorSpec("x", (size,), "uint8"),), tokens)


ONE_POOL = ModelDescription(LAYERS, (PoolDescription("kv", geometry(LAYERS, 5), (0, 1, 2)),))

DERIVED = ModelDescription(
    LAYERS,
    (
        PoolDescription("kv", geometry(LAYERS, 5), (0, 1, 2), packed_drafts=(geometry(2, 3),)),
        PoolDescription("indexer", geometry(1, 7), (1,), derived_from="kv"),
    ),
)

THREE_POOLS = ModelDescription(
    LAYERS,
    (
        PoolDescription("kv", geometry(1, 5), (0,)),
        PoolDescription("swa", geometry(1, 3), (1,), coverage=Window(2 * PAGE + 1)),
        PoolDescription("state", geometry(1, 9, tokens=1), (2,), coverage=Checkpoint()),
    ),
)


def checkpoint_share(model: ModelDescription) -> float:
    """The share of its snapshots, so that every pool gets as many slots."""
    states = sum(pool.slot_bytes for pool in model.pools if isinstance(pool.coverage, Checkpoint))
    return states / model.slot_bytes if 0 < states < model.slot_bytes else 0.25


MODELS = {"one": ONE_POOL, "derived": DERIVED, "three": THREE_POOLS}
"""Models with a pool `kv` that is the anchor."""


def states(*sizes: int) -> PoolGeometry:
    """One layer with a tensor of each size; a slot is one snapshot."""
    return PoolGeometry.uniform(1, tuple(TensorSpec(f"s{size}", (size,), "uint8") for size in sizes), 1)


WINDOW = ModelDescription(
    LAYERS, (PoolDescription("swa", geometry(LAYERS, 3), (0, 1, 2), coverage=Window(2 * PAGE + 1)),)
)

CHUNKED = ModelDescription(
    LAYERS,
    (
        PoolDescription("kv", geometry(1, 5), (0,)),
        PoolDescription("swa", geometry(2, 3), (1, 2), coverage=Window(3 * PAGE), chunk_tokens=3 * PAGE),
    ),
)

WINDOW_AND_STATE = ModelDescription(
    LAYERS,
    (
        PoolDescription("swa", geometry(2, 3), (0, 2), coverage=Window(2 * PAGE + 1)),
        PoolDescription("state", states(9, 4), (1,), coverage=Checkpoint()),
    ),
)

STATE_AND_WINDOW = ModelDescription(
    LAYERS,
    (
        PoolDescription("state", states(9), (1,), coverage=Checkpoint()),
        PoolDescription("swa", geometry(2, 3), (0, 2), coverage=Window(PAGE + 1)),
    ),
)

STATE = ModelDescription(
    LAYERS,
    (
        PoolDescription("state", states(9, 4), (0,), coverage=Checkpoint()),
        PoolDescription("conv", states(3), (2,), coverage=Checkpoint()),
    ),
)

LATENT = ModelDescription(
    LAYERS,
    (
        PoolDescription(
            "latent",
            PoolGeometry.uniform(
                LAYERS, (TensorSpec("latent", (7,), "uint8"), TensorSpec("rope", (3,), "float16")), PAGE
            ),
            (0, 1, 2),
            packed_drafts=(geometry(1, 5),),
        ),
        PoolDescription("indexer", geometry(2, 3), (0, 2), derived_from="latent"),
    ),
)

EVERYTHING = ModelDescription(
    LAYERS,
    (
        PoolDescription(
            "kv",
            PoolGeometry.uniform(
                1,
                (TensorSpec("k", (3,), "uint8"), TensorSpec("v", (2, 3), "float16"), TensorSpec("scale", (1,), "int8")),
                PAGE,
            ),
            (0,),
            packed_drafts=(geometry(4, 3),),
        ),
        PoolDescription("indexer", geometry(1, 7), (0,), derived_from="kv"),
        PoolDescription("swa", geometry(1, 3), (1,), coverage=Window(2 * PAGE + 1)),
        PoolDescription("chunks", geometry(1, 4), (1,), coverage=Window(3 * PAGE), chunk_tokens=3 * PAGE),
        PoolDescription("state", states(9), (2,), coverage=Checkpoint()),
        PoolDescription("conv", states(4, 3), (2,), coverage=Checkpoint()),
    ),
)

KINDS = MODELS | {
    "window": WINDOW,
    "chunked": CHUNKED,
    "window and state": WINDOW_AND_STATE,
    "state and window": STATE_AND_WINDOW,
    "state": STATE,
    "latent": LATENT,
    "everything": EVERYTHING,
}
"""Every kind of pool, alone and with others."""


def namespace(model: ModelDescription = ONE_POOL, salt: str = "") -> Namespace:
    """The namespace of a model that does not exist."""
    return Namespace(
        model="test",
        weights="0" * 64,
        dtype="uint8",
        page_size=PAGE,
        geometry=model.fingerprint,
        salt=salt,
        draft_lookahead=model.draft_lookahead,
    )


def tokens(*ids: int) -> bytes:
    """Token ids as the cache wants them."""
    return np.array(ids, dtype="<u4").tobytes()


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class World:
    """A cache over fake memory, and what an engine does with it."""

    model: ModelDescription = ONE_POOL
    device_pages: int = 16
    host_pages: int = 32
    executor: Any = field(default_factory=lambda: SimulatedExecutor(0, FaultRates(start=1.0)))
    backend: Any = None
    write_policy: str = "write_through"
    timeout_s: float = 1e-9
    window_ratio: float = 1.0
    batch_pages: int = 2
    device_pool: DevicePoolFactory = ArrayDevicePool.page_first
    settings: Mapping[str, Any] = field(default_factory=dict)
    policy: EvictionPolicy | None = None
    agree: Agree | None = None
    place: str = ""
    """Where a rank stands: its bytes are its own, but for those of pools that are `alike` on all ranks."""
    alike: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.texts: dict[Match, bytes] = {}
        """What was computed for an account so far."""
        self.generation = 0
        """How often everything was flushed: what is computed now differs from what was computed before."""
        self.born: dict[Match, int] = {}
        """The generation of the accounts that were open then: they go on as they are."""
        self.namespace = namespace(self.model)
        config = CacheConfig(
            device_size=self.device_pages * self.model.slot_bytes,
            host_size=self.host_pages * self.model.slot_bytes * (self.agree.ranks if self.agree else 1),
            page_size=PAGE,
            window_ratio=self.window_ratio,
            checkpoint_share=checkpoint_share(self.model),
            write_policy=self.write_policy,
            transfer_timeout_s=self.timeout_s,
            prefetch_batch_pages=self.batch_pages,
            **self.settings,
        )
        self.cache: UnifiedRadixCache = build_kv_cache(
            self.model,
            config,
            executor=self.executor,
            clock=self.clock,
            device_pool=self.device_pool,
            policy=self.policy,
            agree=self.agree,
        )
        if self.backend is not None:
            self.cache.attach_storage_backend(PageStore(self.backend))

    # What an engine does

    def compute(self, match: Match, text: bytes) -> None:
        """Write the right bytes to all that it was lent: pages and snapshots up to the text's end, and live states."""
        pages = len(text) // 4 // PAGE
        for name, pool in self._device_pools():
            run = np.array(match.slots(self._source(name))[:pages])
            run[~self._lent(match, name, run)] = HOLE
            self._write(name, pool, run, text, self._generation(match))
            if name in match.live_slots:
                content = self._page(name, text, pool.geometry.slot_bytes, self._generation(match))[None]
                slots = DeviceSlots(np.array([match.live_slots[name]], np.int32))
                for layer in range(len(pool.geometry.layers)):
                    pool.load_layer(slots, content, HostSlots(np.zeros(1, np.int32)), layer)
        self.texts[match] = text

    def prefill(self, prompt: bytes, ticket: Prefetch | None = None, *, load: bool = True) -> Match:
        """Serve a prompt: match, load, allocate, compute, insert. The match stays open."""
        match = self.cache.match_prefix(prompt, self.namespace, ticket)
        if load:
            self.finish_load(match)
        self.check(match)
        missing = len(prompt) // 4 - match.length_tokens
        if self.allocate(match, missing):
            self.compute(match, prompt)
            self.cache.insert(match, prompt)
        return match

    def decode(self, match: Match, text: bytes, *, checkpoint: bool = False, checkpoints: bool = True) -> bool:
        """Compute up to the end of `text`, which goes on from what the account has, and share it."""
        if not self.allocate(match, len(text) // 4 - match.length_tokens, checkpoint=checkpoint):
            return False
        self.compute(match, text)
        self.cache.insert(match, text, checkpoints=checkpoints)
        return True

    def finish_load(self, match: Match) -> Load | None:
        """Load what is on the host and poll until it has settled."""
        self.texts.pop(match, None)
        load = self.cache.load_back(match)
        for _ in itertools.repeat(None, 50):
            if load is not None and load.done:
                break
            self.cache.poll()
            if load is None:
                load = self.cache.load_back(match)
        if load is not None and not load.done and self.agree is not None:
            self.clock.now_s += 1.0
            self.cache.poll()
        if load is not None:
            load.result()
        return load

    def allocate(self, match: Match, new_tokens: int, *, checkpoint: bool = True) -> bool:
        """Ask for slots, letting write-backs settle in between."""
        for _ in range(50):
            if self.cache.allocate(match, new_tokens, checkpoint=checkpoint) is not None:
                return True
            self.cache.poll()
        return False

    def serve(self, prompt: bytes, ticket: Prefetch | None = None) -> Match:
        """Prefill and release."""
        match = self.prefill(prompt, ticket)
        self.cache.release(match)
        return match

    def settle(self) -> None:
        """Poll until nothing is in flight (what was lost stays so)."""
        for _ in range(200):
            self.cache.poll()

    def write(self, name: str, run: np.ndarray, text: bytes) -> None:
        """Write the right bytes of a text to slots of one device pool, page by page."""
        pools = dict(self._device_pools())
        self._write(name, pools[name], np.asarray(run), text, self.generation)

    # What is right

    def check(self, match: Match) -> None:
        """Every page that the account goes on from holds the bytes that its tokens mean, in every pool.

        Before it has computed anything: what resuming needs. Then: that, its live states and all its own snapshots.
        """
        text = self.texts.get(match)
        pages = match.shared_tokens // PAGE if text is None else len(text) // 4 // PAGE
        for name, pool in self._device_pools():
            entry = self.cache.controller.mem_pool_host.get_entry(self._source(name))
            run = match.slots(self._source(name))
            required = entry.coverage.required(pages, PAGE)
            chosen = np.arange(required.start, required.stop)
            if text is not None and isinstance(entry.coverage, Checkpoint):
                chosen = np.flatnonzero(self._lent(match, name, run[:pages]))
                live = pool.stage(DeviceSlots(np.array([match.live_slots[name]], np.int32)))
                expected = self._page(name, text, pool.geometry.slot_bytes, self._generation(match))
                np.testing.assert_array_equal(live[0], expected, err_msg=f"live state of {name}")
            assert not np.any(run[chosen] == HOLE), (name, run)
            got = pool.stage(DeviceSlots(run[chosen]))
            prompt, generation = match.tokens if text is None else text, self._generation(match)
            want = self._content(name, pool, prompt, chosen.tolist(), generation)
            np.testing.assert_array_equal(got, want, err_msg=f"pool {name}")

    def cached(self, prompt: bytes) -> tuple[int, int]:
        """Tokens usable on the device, and with loads."""
        match = self.cache.match_prefix(prompt, self.namespace)
        lengths = (match.device_tokens, match.device_tokens + match.host_tokens)
        self.cache.release(match)
        return lengths

    def idle(self) -> None:
        """Raises unless nothing is held, pinned or in flight, and all sums match."""
        self.cache.audit()
        stats = self.cache.stats()
        assert stats.pins == 0, stats
        assert stats.open_matches == 0, stats
        assert stats.in_flight == 0, stats
        for pool in stats.pools:
            assert pool.other == 0, pool

    def free_and_evictable(self, tier: Tier) -> int:
        """Anchor slots that could be had."""
        state = self.cache.controller.state
        return state.room(state.group.anchor_entry.name, tier)

    def _lent(self, match: Match, name: str, run: np.ndarray) -> np.ndarray:
        """Which slots of a run the account was lent; bool per page."""
        own: np.ndarray = np.isin(run, match.lent[self._source(name)]) & (run != HOLE)
        return own

    def _source(self, name: str) -> str:
        entry = self.cache.controller.mem_pool_host.get_entry(name.split(".")[0])
        return entry.derived_from or entry.name

    def _device_pools(self):
        for entry in self.cache.controller.mem_pool_host.entries:
            yield entry.name, entry.device_pool
            for index, draft in enumerate(entry.packed_draft_device_pools):
                yield f"{entry.name}.draft{index}", draft

    def _write(self, name: str, pool, run: np.ndarray, prompt: bytes, generation: int = 0) -> None:
        pages = np.flatnonzero(run != HOLE)
        content = self._content(name, pool, prompt, pages.tolist(), generation)
        rows = HostSlots(np.arange(len(pages), dtype=np.int32))
        for layer in range(len(pool.geometry.layers)):
            pool.load_layer(DeviceSlots(run[pages]), content, rows, layer)

    def _generation(self, match: Match) -> int:
        return self.born.get(match, self.generation)

    def _page(self, name: str, prefix: bytes, size: int, generation: int) -> ByteArray:
        place = "" if name in self.alike else self.place
        return page_content(self.namespace, name + place, prefix, size, generation)

    def _content(self, name: str, pool, prompt: bytes, pages: Sequence[int], generation: int) -> ByteArray:
        ends = [((page + 1) * PAGE + self.model.draft_lookahead) * 4 for page in pages]
        return (
            np.stack([self._page(name, prompt[:end], pool.geometry.slot_bytes, generation) for end in ends])
            if len(pages)
            else np.empty((0, pool.geometry.slot_bytes), np.uint8)
        )


def page_content(owner: Namespace, pool: str, prefix: bytes, size: int, generation: int = 0) -> ByteArray:
    """The bytes of one page: they follow from the namespace, the pool, all tokens up to its end, and the generation."""
    seed = hashlib.sha256(b"%d" % generation + owner.fingerprint + pool.encode() + b"\0" + prefix).digest()
    return np.frombuffer(hashlib.shake_128(seed).digest(size), dtype=np.uint8)
