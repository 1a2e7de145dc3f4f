"""S03: page 3 of 8 can't be read: the hit is 2 pages, the rest is computed, nothing stale is used, it is counted."""

import pytest

from hicache.device.array import ArrayDevicePool
from hicache.keys import page_keys
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import Fault, FaultyBackend, Operation
from hicache.transfer import Load, ThreadExecutor
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import DERIVED, MODELS, PAGE, World, tokens

PROMPT = tokens(*range(8 * PAGE + 1))


class BrokenPool(ArrayDevicePool):
    """Fails while it is told to, before or after it has copied."""

    broken = ""

    def load_layer(self, slots, pages, rows, layer) -> None:
        if self.broken == "at once":
            raise OSError("no answer")
        super().load_layer(slots, pages, rows, layer)
        if self.broken == "afterwards" and layer == len(self.geometry.layers) - 1:
            raise OSError("no answer")


@pytest.mark.parametrize("model", ["one", "derived"])
def test_a_page_that_the_completion_calls_bad(model):
    """All layers arrive and the load ends as always; only its completion knows."""
    hand = HandExecutor()
    world = World(MODELS[model], executor=hand)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    assert load.tokens == 8 * PAGE
    hand.run(Load, bad={DERIVED.pools[-1].name if model == "derived" else "kv": [2]})
    for layer in range(3):
        load.wait(layer)
    assert load.result() == 2 * PAGE
    assert match.length_tokens == 2 * PAGE
    assert world.cache.stats().counters["load_failed"] == 1
    world.check(match)
    assert world.cached(PROMPT) == (2 * PAGE, 2 * PAGE), "a page that was not readable is not offered again"
    assert world.allocate(match, 6 * PAGE + 1)
    world.compute(match, PROMPT)
    match = world.cache.insert(match, PROMPT)
    world.check(match)
    assert match.cached_tokens == {"device": 0, "host": 2 * PAGE, "storage": 0}
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()
    assert world.cached(PROMPT)[0] == 8 * PAGE


@pytest.mark.parametrize("broken", ["at once", "afterwards"])
@pytest.mark.parametrize("pool", ["kv", "indexer", "kv.draft0"])
def test_a_copy_that_raises_takes_the_whole_load_with_it(broken, pool):
    pools: dict[str, BrokenPool] = {}

    def make(name, geometry, slots) -> BrokenPool:
        pools[name] = BrokenPool.page_first(name, geometry, slots)
        return pools[name]

    world = World(DERIVED, executor=ThreadExecutor(), timeout_s=30.0, device_pool=make)
    world.serve(PROMPT)
    while world.cache.stats().in_flight:
        world.cache.poll()
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    pools[pool].broken = broken
    load = world.cache.load_back(match)
    for layer in range(3):
        load.wait(layer)
    assert load.result() == 0
    assert world.cache.stats().counters["load_failed"] == 1
    pools[pool].broken = ""
    assert world.cache.load_back(match).result() == 0
    assert world.allocate(match, 8 * PAGE + 1)
    world.compute(match, PROMPT)
    world.check(world.cache.insert(match, PROMPT))
    world.cache.release(match)
    while world.cache.stats().in_flight:
        world.cache.poll()
    world.idle()
    world.cache.close()


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.MISS, Fault.FLIP, Fault.STALE, Fault.RAISE])
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("pool", ["kv", "indexer"])
def test_a_page_that_storage_cannot_read(fault, threads, pool):
    class Shelf(MemoryBackend):
        def close(self) -> None:
            """Outlives the cache."""

    backend = FaultyBackend(Shelf(), lambda operation, key: None)
    first = World(DERIVED, backend=backend)
    first.serve(PROMPT)
    first.settle()
    first.cache.close()
    world = World(DERIVED, backend=backend, executor=ThreadExecutor() if threads else HandExecutor(), batch_pages=1)
    bad = page_keys(world.namespace.fingerprint, PROMPT, PAGE)[2 * 32 : 3 * 32]
    backend.choose = lambda operation, key: (
        fault if operation is Operation.READ and (key.page, key.pool) == (bad, pool) else None
    )
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    while not ticket.done:
        if isinstance(world.executor, HandExecutor):
            world.executor.run()
        world.cache.poll()
    backend.choose = lambda operation, key: None
    match = world.cache.match_prefix(PROMPT, world.namespace, ticket)
    assert match.host_tokens == 2 * PAGE
    load = world.cache.load_back(match)
    if isinstance(world.executor, HandExecutor):
        world.executor.run()
    for progress in load._progress:
        assert progress.wait_end(30.0)
    assert load.result() == 2 * PAGE
    world.check(match)
    assert match.cached_tokens == {"device": 0, "host": 0, "storage": 2 * PAGE}
    assert world.cache.stats().counters["fetch_failed_pages"] >= 1
    assert world.allocate(match, 6 * PAGE + 1)
    world.compute(match, PROMPT)
    world.check(world.cache.insert(match, PROMPT))
    world.cache.release(match)
    world.cache.close()
