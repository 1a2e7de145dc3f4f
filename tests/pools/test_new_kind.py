"""A kind of state that the library has never heard of is one declaration: it then goes through all tiers and back."""

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from hicache.builder import ModelDescription, PoolDescription, build_kv_cache
from hicache.cache import Match, UnifiedRadixCache
from hicache.config import CacheConfig
from hicache.controller import Prefetch
from hicache.coverage import Checkpoint, Coverage, Full, Window
from hicache.device.array import ArrayDevicePool
from hicache.errors import ConfigError
from hicache.keys import Namespace
from hicache.layout import DeviceLayout, PoolGeometry, TensorSpec
from hicache.pools import DevicePool
from hicache.units import HOLE, PageRange
from tests.pools.device_bytes import LAYOUTS, all_slots, make_pool, write_slot

PAGES = 6


def sketch(tokens: int) -> PoolGeometry:
    """Two layers of two tensors of other dtypes, odd in size, each layer of its own."""
    return PoolGeometry(
        (
            (TensorSpec("sketch", (3,), "int8"), TensorSpec("norm", (), "bfloat16")),
            (TensorSpec("sketch", (1, 5), "int8"), TensorSpec("norm", (3,), "float32")),
        ),
        tokens,
    )


def flat(tokens: int, layers: int = 1, size: int = 7) -> PoolGeometry:
    return PoolGeometry.uniform(layers, (TensorSpec("x", (size,), "uint8"),), tokens)


@dataclass
class Engine:
    """Writes random bytes to what it is lent, remembers them per page, and asks for them again."""

    model: ModelDescription
    page_size: int
    store: Path
    layout: str = "page first"
    content: dict[tuple[str, int], bytes] = field(default_factory=dict)
    pools: dict[str, ArrayDevicePool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt = np.arange(PAGES * self.page_size + 1, dtype=np.uint32)
        self.namespace = Namespace(
            model="test",
            weights="0" * 64,
            dtype="uint8",
            page_size=self.page_size,
            geometry=self.model.fingerprint,
            salt="",
        )
        self.cache = self.build()

    def build(self) -> UnifiedRadixCache:
        """A cache with memory of its own, over the same store."""
        size = 8 * PAGES * self.model.slot_bytes
        config = CacheConfig(
            device_size=size,
            host_size=size,
            page_size=self.page_size,
            window_ratio=1.0,
            checkpoint_share=0.5,
            storage_url=f"file:{self.store}",
        )
        return build_kv_cache(self.model, config, device_pool=self.make_pool)

    def make_pool(self, name: str, geometry: PoolGeometry, slots: int) -> DevicePool:
        self.pools[name] = make_pool(name, geometry, slots, self.layout)
        return self.pools[name]

    def source(self, pool: str) -> str:
        entry = self.cache.controller.mem_pool_host.get_entry(pool.split(".")[0])
        return entry.derived_from or entry.name

    def required(self, pool: str) -> PageRange:
        entry = self.cache.controller.mem_pool_host.get_entry(self.source(pool))
        return entry.coverage.required(PAGES, self.page_size)

    def compute(self) -> dict[str, list[int]]:
        """Serves the prompt cold, and returns where its pages lie on the device."""
        dice = random.Random(7)
        match = self.cache.match_prefix(self.prompt, self.namespace)
        assert match.length_tokens == 0
        assert self.cache.allocate(match, PAGES * self.page_size, checkpoint=True) is not None
        for name, pool in self.pools.items():
            for page, slot in enumerate(match.slots(self.source(name)).tolist()):
                if slot != HOLE:
                    self.content[name, page] = dice.randbytes(pool.geometry.slot_bytes)
                    write_slot(pool, slot, np.frombuffer(self.content[name, page], np.uint8))
        self.cache.insert(match, self.prompt[: PAGES * self.page_size])
        slots = {name: match.slots(self.source(name)).tolist() for name in self.pools}
        self.cache.release(match)
        return slots

    def settle(self) -> None:
        deadline = time.monotonic() + 30
        while self.cache.in_flight:
            assert time.monotonic() < deadline
            self.cache.poll()

    def evict_device(self) -> None:
        """Frees every device slot of every pool."""
        for entry in self.cache.controller.mem_pool_host.entries:
            if entry.derived_from is None:
                assert entry.device_evict_fn is not None and entry.device_available_fn is not None
                entry.device_evict_fn(entry.device_pool.slots)
                assert entry.device_available_fn() == entry.device_pool.slots

    def occupy(self) -> Match:
        """Somebody else takes slots first, so that what is loaded lands in others."""
        match = self.cache.match_prefix(np.array([9]), self.namespace)
        assert self.cache.allocate(match, PAGES * self.page_size, checkpoint=True) is not None
        return match

    def resume(self, ticket: Prefetch | None = None) -> dict[str, list[int]]:
        """Matches and loads the prompt, checks all bytes that coverage requires, and returns where they lie."""
        match = self.cache.match_prefix(self.prompt, self.namespace, ticket)
        load = self.cache.load_back(match)
        assert load is not None
        for layer in range(self.model.layer_count):
            load.wait(layer)
        assert load.result() == PAGES * self.page_size
        found = {}
        for name, pool in self.pools.items():
            required = self.required(name)
            found[name] = match.slots(self.source(name))[required.start : required.stop].tolist()
            real = all_slots(pool)
            for page, slot in zip(range(required.start, required.stop), found[name], strict=True):
                assert real[slot].tobytes() == self.content[name, page], f"page {page} of {name}"
        self.cache.release(match)
        return found

    def round_trips(self) -> None:
        """Device to host and back, then to the store and back in another cache: other slots, equal bytes."""
        before = self.compute()
        self.settle()
        self.evict_device()
        other = self.occupy()
        after = self.resume()
        for name, slots in after.items():
            earlier = before[name][-len(slots) :]
            assert all(old != new for old, new in zip(earlier, slots, strict=True)), f"other slots of {name}"
        self.cache.release(other)
        self.cache.audit()
        self.settle()
        self.cache.close()

        self.pools.clear()
        self.cache = self.build()
        ticket = self.cache.prefetch(self.prompt, self.namespace, timeout_s=30.0)
        while not ticket.done:
            self.cache.poll()
        self.resume(ticket)
        self.settle()
        self.cache.audit()
        self.cache.close()


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("coverage", [Full(), Window(3), Window(9), Checkpoint()], ids=repr)
def test_an_unknown_kind_of_state_alone_is_one_declaration(coverage: Coverage, layout: str, tmp_path: Path) -> None:
    tokens = 1 if isinstance(coverage, Checkpoint) else 4
    model = ModelDescription(2, (PoolDescription("sketch", sketch(tokens), (0, 1), coverage=coverage),))
    Engine(model, 4, tmp_path, layout).round_trips()


@pytest.mark.parametrize("coverage", [Full(), Window(3), Window(9), Checkpoint()], ids=repr)
def test_an_unknown_kind_of_state_beside_others_is_one_declaration(coverage: Coverage, tmp_path: Path) -> None:
    tokens = 1 if isinstance(coverage, Checkpoint) else 4
    model = ModelDescription(
        3,
        (
            PoolDescription("kv", flat(4, 2), (0, 2)),
            PoolDescription("sketch", sketch(tokens), (1, 2), coverage=coverage),
        ),
    )
    Engine(model, 4, tmp_path).round_trips()


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_several_of_them_with_pools_derived_from_windows_and_drafts_packed_in_them(layout: str, tmp_path: Path) -> None:
    draft = PoolGeometry(((TensorSpec("k", (3,), "int8"),), (TensorSpec("k", (1,), "float32"),)), 4)
    model = ModelDescription(
        3,
        (
            PoolDescription("swa", sketch(4), (0, 2), coverage=Window(9), packed_drafts=(draft, flat(4, 4, 3))),
            PoolDescription("swa norms", flat(4, 1, 5), (2,), derived_from="swa"),
            PoolDescription("near", sketch(4), (0, 1), coverage=Window(2), packed_drafts=(flat(4, 1, 11),)),
            PoolDescription("near codes", sketch(4), (1, 2), derived_from="near"),
            PoolDescription("state", sketch(1), (1, 2), coverage=Checkpoint(), packed_drafts=(flat(1, 2, 13),)),
            PoolDescription("state norms", flat(1, 1, 3), (1,), coverage=Checkpoint(), derived_from="state"),
        ),
    )
    Engine(model, 4, tmp_path, layout).round_trips()


@pytest.mark.parametrize("sizes", [(2, 13, 31), (101, 2, 13), (31, 101, 2)])
def test_pages_of_a_prime_number_of_bytes(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    first, second, third = sizes
    model = ModelDescription(
        2,
        (
            PoolDescription("kv", flat(1, 1, first), (0,)),
            PoolDescription("swa", flat(1, 1, second), (1,), coverage=Window(3)),
            PoolDescription("state", flat(1, 1, third), (0,), coverage=Checkpoint()),
        ),
    )
    assert [pool.slot_bytes for pool in model.pools] == [first, second, third]
    Engine(model, 1, tmp_path).round_trips()


class Scaled(ArrayDevicePool):
    """A pool of k that carries a scale per token besides."""

    @classmethod
    def with_scale(cls, name: str, geometry: PoolGeometry, slots: int) -> "Scaled":
        layers = tuple((*layer, TensorSpec("scale", (), "float32")) for layer in geometry.layers)
        layout = DeviceLayout.layer_first(PoolGeometry(layers, geometry.tokens_per_slot), slots)
        return cls(name, layout, [np.zeros(size, np.uint8) for size in layout.buffers_bytes])


@dataclass
class ScaledEngine(Engine):
    """Its pools have one more tensor than `bare`, what their makers are given."""

    bare: PoolGeometry = field(default_factory=lambda: flat(4, 2))

    def make_pool(self, name: str, geometry: PoolGeometry, slots: int) -> DevicePool:
        self.pools[name] = Scaled.with_scale(name, self.bare, slots)
        return self.pools[name]


def test_a_subclass_of_a_device_pool_with_one_more_tensor(tmp_path: Path) -> None:
    layers = tuple((*layer, TensorSpec("scale", (), "float32")) for layer in flat(4, 2).layers)
    model = ModelDescription(2, (PoolDescription("kv", PoolGeometry(layers, 4), (0, 1)),))
    ScaledEngine(model, 4, tmp_path).round_trips()


def test_one_more_tensor_that_is_not_declared_is_refused_by_name(tmp_path: Path) -> None:
    model = ModelDescription(2, (PoolDescription("kv", flat(4, 2), (0, 1)),))
    with pytest.raises(ConfigError, match="'kv' has another geometry on the device"):
        ScaledEngine(model, 4, tmp_path)


class EveryOther:
    """A coverage of the engine's own."""

    def required(self, pages: int, page_size: int) -> PageRange:
        return PageRange(pages // 2, pages)

    def __repr__(self) -> str:
        return "EveryOther()"


@pytest.mark.parametrize("coverage", [EveryOther(), None, "full", Window])
def test_an_unknown_coverage_is_refused_by_name(coverage: object, tmp_path: Path) -> None:
    pool = PoolDescription("sketch", sketch(4), (0, 1), coverage=coverage)  # type: ignore[arg-type]
    model = ModelDescription(2, (PoolDescription("kv", flat(4, 2), (0, 1)), pool))
    with pytest.raises(ConfigError, match=r"'sketch' has the coverage .* not known; use Full, Window or Checkpoint"):
        Engine(model, 4, tmp_path)
