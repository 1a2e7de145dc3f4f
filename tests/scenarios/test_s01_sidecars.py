"""S01: every tensor of every pool comes back, at other slots, and no layer starts before all its pools are in."""

import threading

import numpy as np
import pytest

from hicache.builder import ModelDescription, PoolDescription
from hicache.cache import Match
from hicache.coverage import Full, longest_usable
from hicache.device.array import ArrayDevicePool
from hicache.layout import PoolGeometry, TensorSpec
from hicache.storage.memory import MemoryBackend
from hicache.transfer import ThreadExecutor
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import KINDS, PAGE, World, tokens

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


MODELS = {"odd": MODEL} | KINDS


def device_pools() -> list[tuple[str, str, int]]:
    """Every model, every device pool of it (packed drafts too), and the first model layer that it comes with."""
    found = []
    for model, description in MODELS.items():
        for pool in description.pools:
            found.append((model, pool.name, min(pool.layers)))
            found += [(model, f"{pool.name}.draft{number}", 0) for number in range(len(pool.packed_drafts))]
    return found


class HeldPool(ArrayDevicePool):
    """Its loads wait until they are let through."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.open = threading.Event()
        self.open.set()

    def load_layer(self, slots, pages, rows, layer) -> None:
        assert self.open.wait(30.0)
        super().load_layer(slots, pages, rows, layer)


def slots_of(world: World, match: Match) -> dict[str, list[int]]:
    """Per pool, the slots that going on after 5 pages needs."""
    found = {}
    for pool in world.model.pools:
        if pool.derived_from is None:
            required = pool.coverage.required(5, PAGE)
            found[pool.name] = match.slots(pool.name)[required.start : required.stop].tolist()
    return found


def layers(place: str):
    """Device pools in one of two layouts."""
    return HeldPool.layer_first if place == "layer first" else HeldPool.page_first


@pytest.mark.parametrize("place", ["layer first", "page first"])
@pytest.mark.parametrize(("model", "late", "layer"), device_pools())
def test_a_layer_starts_only_once_all_its_pools_are_in(place, model, late, layer):
    pools: dict[str, HeldPool] = {}

    def make(name: str, geometry: PoolGeometry, slots: int) -> HeldPool:
        pools[name] = layers(place)(name, geometry, slots)
        return pools[name]

    world = World(MODELS[model], executor=ThreadExecutor(), timeout_s=30.0, device_pool=make)
    first = world.prefill(PROMPT)
    before = slots_of(world, first)
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
    after = slots_of(world, match)
    assert all(after[pool] != before[pool] for pool in after), "other slots than before"
    world.check(match)
    world.cache.release(match)
    world.cache.release(holder)
    world.cache.audit()
    world.cache.close()


class Forgetful(MemoryBackend):
    """Takes only every second page of one pool, the first one included."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.pool = pool
        self.asked = 0

    def write(self, keys, values):
        kept = []
        for number, key in enumerate(keys):
            self.asked += key.pool == self.pool
            if key.pool != self.pool or self.asked % 2:
                kept.append(number)
        stored = super().contains(keys) & False
        if kept:
            stored[kept] = super().write([keys[number] for number in kept], [values[number] for number in kept])
        return stored

    def close(self) -> None:
        """Outlives the cache."""


@pytest.mark.parametrize(
    ("model", "missing"), [(model, pool.name) for model, made in MODELS.items() for pool in made.pools]
)
def test_an_entry_without_its_sidecar_is_a_miss(model, missing):
    hand, backend = HandExecutor(), Forgetful(missing)
    world = World(MODELS[model], executor=hand, backend=backend, batch_pages=8)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    for pages in range(1, 6):
        assert world.decode(match, PROMPT[: 4 * pages * PAGE], checkpoint=True)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    assert backend.asked == 5
    world.cache.close()
    pool = next(pool for pool in MODELS[model].pools if pool.name == missing)
    source = next(one for one in MODELS[model].pools if one.name == (pool.derived_from or missing))
    hit = longest_usable([(source.coverage, np.arange(5) % 2 == 0)], PAGE)
    hand = HandExecutor()
    world = World(MODELS[model], executor=hand, backend=backend)
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    hand.settle(world.cache.poll)
    assert ticket.done
    assert world.cached(PROMPT) == (0, hit * PAGE)
    match = world.cache.match_prefix(PROMPT, world.namespace, ticket)
    load = world.cache.load_back(match)
    hand.settle(world.cache.poll)
    assert load.result() == hit * PAGE
    world.check(match)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_one_pool_alone_may_lose_its_pages(model, tier):
    """The hit is what the others and the next lower tier allow; pools of full coverage of a page go together."""
    for pool in MODELS[model].pools:
        if pool.derived_from is not None:
            continue
        world = World(MODELS[model], backend=MemoryBackend())
        world.serve(PROMPT)
        world.settle()
        if tier is Tier.HOST:
            world.cache.evict(Tier.DEVICE)
        before = {(one.pool, one.tier): one.cached for one in world.cache.stats().pools}
        assert world.cache.evict(tier, pool=pool.name) == before[pool.name, tier] > 0
        world.cache.audit()
        after = {(one.pool, one.tier): one.cached for one in world.cache.stats().pools}
        if tier is Tier.DEVICE:
            gone = {name for (name, place), count in after.items() if place is tier and not count}
            whole = {one.name for one in MODELS[model].pools if one.coverage == Full() and one.derived_from is None}
            assert gone == (whole if pool.name in whole else {pool.name})
            assert world.cached(PROMPT) == (0, 5 * PAGE)
        else:
            assert world.cached(PROMPT) == (0, 0)
        ticket = world.cache.prefetch(PROMPT, world.namespace)
        world.settle()
        match = world.prefill(PROMPT, ticket)
        lower = {Tier.DEVICE: "host", Tier.HOST: "storage"}[tier]
        assert match.cached_tokens[lower] > 0
        assert sum(match.cached_tokens.values()) == 5 * PAGE
        world.check(match)
        world.cache.release(match)
        world.settle()
        world.idle()
