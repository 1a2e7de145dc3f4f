"""S01: every tensor of every pool comes back, at other slots, and no layer starts before all its pools are in."""

import threading

import pytest

from hicache.builder import ModelDescription, PoolDescription
from hicache.device.array import ArrayDevicePool
from hicache.layout import PoolGeometry, TensorSpec
from hicache.storage.memory import MemoryBackend
from hicache.transfer import ThreadExecutor
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import PAGE, World, tokens

PROMPT = tokens(*range(5 * PAGE + 1))

KV = PoolGeometry.uniform(3, (TensorSpec("k", (5,), "uint8"), TensorSpec("v", (2,), "float16")), PAGE)
DRAFT = PoolGeometry.uniform(2, (TensorSpec("k", (3,), "uint8"),), PAGE)
INDEXER = PoolGeometry.uniform(1, (TensorSpec("key", (7,), "uint8"),), PAGE)
ODD = PoolGeometry(
    (
        (TensorSpec("k", (3,), "uint8"), TensorSpec("scale", (1,), "uint8")),
        (TensorSpec("k", (3,), "uint8"), TensorSpec("scale", (1,), "uint8"), TensorSpec("extra", (3, 3), "int8")),
    ),
    PAGE,
)

MODEL = ModelDescription(
    3,
    (
        PoolDescription("kv", KV, (0, 1, 2), packed_drafts=(DRAFT,)),
        PoolDescription("indexer", INDEXER, (1,), derived_from="kv"),
        PoolDescription("odd", ODD, (0, 2)),
    ),
)


class HeldPool(ArrayDevicePool):
    """Its loads wait until they are let through."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.open = threading.Event()
        self.open.set()

    def load_layer(self, slots, pages, rows, layer) -> None:
        assert self.open.wait(30.0)
        super().load_layer(slots, pages, rows, layer)


def layers(place: str):
    """Device pools in one of two layouts."""
    return HeldPool.layer_first if place == "layer first" else HeldPool.page_first


@pytest.mark.parametrize("place", ["layer first", "page first"])
@pytest.mark.parametrize(("late", "layer"), [("indexer", 1), ("odd", 0), ("kv", 0), ("kv.draft0", 0)])
def test_a_layer_starts_only_once_all_its_pools_are_in(place, late, layer):
    pools: dict[str, HeldPool] = {}

    def make(name: str, geometry: PoolGeometry, slots: int) -> HeldPool:
        pools[name] = layers(place)(name, geometry, slots)
        return pools[name]

    world = World(MODEL, executor=ThreadExecutor(), timeout_s=30.0, device_pool=make)
    first = world.prefill(PROMPT)
    before = first.slots().copy()
    world.cache.release(first)
    while world.cache.stats().in_flight:
        world.cache.poll()
    world.cache.evict(Tier.DEVICE)
    holder = world.cache.match_prefix(tokens(1), world.namespace)
    assert world.allocate(holder, 3 * PAGE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    pools[late].open.clear()
    load = world.cache.load_back(match)
    (progress,) = load._progress
    if layer:
        assert progress.wait(layer - 1, 30.0)
    assert not progress.wait(layer, 0.05), "the sidecar's part of this layer is not there"
    assert not load.done
    pools[late].open.set()
    for number in range(3):
        load.wait(number)
    assert load.result() == 5 * PAGE
    assert set(match.slots().tolist()) != set(before[:5].tolist()), "other slots than before"
    world.check(match)
    world.cache.release(match)
    world.cache.release(holder)
    world.cache.audit()
    world.cache.close()


@pytest.mark.parametrize("missing", ["indexer", "odd"])
def test_an_entry_without_its_sidecar_is_a_miss(missing):
    class Forgetful(MemoryBackend):
        def write(self, keys, values):
            kept = [number for number, key in enumerate(keys) if key.pool != missing or number % 2 == 0]
            stored = super().contains(keys) & False
            stored[kept] = super().write([keys[i] for i in kept], [values[i] for i in kept])
            return stored

        def close(self) -> None:
            """Outlives the cache."""

    hand, backend = HandExecutor(), Forgetful()
    world = World(MODEL, executor=hand, backend=backend, batch_pages=8)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert world.cache.stats().counters["store_failed_pages"] == 2
    world.cache.close()
    hand = HandExecutor()
    world = World(MODEL, executor=hand, backend=backend)
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    hand.settle(world.cache.poll)
    assert ticket.done
    assert world.cached(PROMPT) == (0, PAGE), "page 1 has no sidecar"
    match = world.cache.match_prefix(PROMPT, world.namespace, ticket)
    load = world.cache.load_back(match)
    hand.settle(world.cache.poll)
    assert load.result() == PAGE
    world.check(match)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()
