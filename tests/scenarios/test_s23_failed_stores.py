"""S23 through the cache: k of n stores fail; the hit is the good prefix, and the rest is stored at the next use."""

import pytest

from hicache.keys import page_keys
from hicache.storage.codec import HEADER_BYTES
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import Fault, FaultyBackend, Operation
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import MODELS, PAGE, World, tokens

PROMPT = tokens(*range(6 * PAGE + 1))


@pytest.mark.parametrize("model", ["one", "derived"])
@pytest.mark.parametrize("bad", [{3}, {0}, {2, 4}, set(range(6))])
def test_the_hit_is_the_good_prefix_and_the_rest_is_tried_again(model, bad):
    hand = HandExecutor()
    backend = FaultyBackend(MemoryBackend(), lambda operation, key: None)
    world = World(MODELS[model], executor=hand, backend=backend)
    keys = page_keys(world.namespace.fingerprint, PROMPT, PAGE)
    failing = {keys[32 * page : 32 * (page + 1)] for page in bad}
    pool = MODELS[model].pools[-1].name
    backend.choose = lambda operation, key: (
        Fault.FAIL if operation is Operation.WRITE and key.pool == pool and key.page in failing else None
    )
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    backend.choose = lambda operation, key: None
    stats = world.cache.stats()
    assert stats.counters["store_failed_pages"] == len(bad)
    assert stats.counters["store_pages"] == 6 - len(bad)
    sizes = {one.name: one.slot_bytes for one in MODELS[model].pools}
    written = sum((6 - len(bad) if name == pool else 6) * size for name, size in sizes.items())
    assert stats.storage.written_bytes == written == _held(backend, stats.storage.written_pages)

    def from_storage() -> int:
        for tier in (Tier.DEVICE, Tier.HOST):
            world.cache.evict(tier)
        ticket = world.cache.prefetch(PROMPT, world.namespace)
        hand.settle(world.cache.poll)
        assert ticket.done
        match = world.cache.match_prefix(PROMPT, world.namespace, ticket)
        load = world.cache.load_back(match)
        hand.settle(world.cache.poll)
        load.result()
        world.check(match)
        world.cache.release(match)
        hand.settle(world.cache.poll)
        return int(match.cached_tokens["storage"])

    assert from_storage() == min(bad) * PAGE
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert from_storage() == 6 * PAGE
    world.idle()


def test_a_prompt_that_is_whole_in_memory_is_stored_at_its_next_use():
    hand = HandExecutor()
    backend = FaultyBackend(MemoryBackend(), lambda operation, key: None)
    world = World(executor=hand, backend=backend)
    backend.choose = lambda operation, key: Fault.RAISE if operation is Operation.WRITE else None
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert world.cache.stats().storage.written_pages == 0
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert world.cache.stats().storage.written_pages == 0
    backend.choose = lambda operation, key: None
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert world.cache.stats().storage.written_pages == 6
    world.idle()


def _held(backend, pages):
    """Bytes that the store really holds, without the headers."""
    return backend.inner.used_bytes - pages * HEADER_BYTES
