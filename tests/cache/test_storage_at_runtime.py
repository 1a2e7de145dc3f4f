"""Stores that come while pages are cached: what leads to a page is stored before it, and nothing is asked twice."""

from collections.abc import Sequence

import pytest

from hicache.keys import page_keys
from hicache.storage import Buffers, PageStore, StorageKey
from hicache.storage.memory import MemoryBackend
from hicache.units import BoolArray, Tier
from tests.hand import HandExecutor
from tests.world import MODELS, PAGE, World, tokens

PROMPT = tokens(*range(6 * PAGE + 1))
LONGER = tokens(*range(9 * PAGE + 1))


class Diary(MemoryBackend):
    """Remembers in which order pages were written, and outlives the caches that use it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[StorageKey] = []

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        self.written += keys
        return super().write(keys, values)

    def close(self) -> None:
        """Keeps everything."""


def serve(world: World, hand: HandExecutor, prompt: bytes) -> None:
    match = world.cache.match_prefix(prompt, world.namespace)
    load = world.cache.load_back(match)
    hand.settle(world.cache.poll)
    load.result()
    world.check(match)
    assert world.allocate(match, len(prompt) // 4 - match.length_tokens)
    world.compute(match, prompt)
    world.cache.insert(match, prompt)
    world.cache.release(match)
    hand.settle(world.cache.poll)


@pytest.mark.parametrize("model", ["one", "derived"])
@pytest.mark.parametrize("gone", [(), (Tier.DEVICE,)])
def test_what_was_cached_before_a_store_came_is_stored_root_first(model, gone):
    hand = HandExecutor()
    world = World(MODELS[model], executor=hand, device_pages=32)
    serve(world, hand, PROMPT)
    for tier in gone:
        world.cache.evict(tier)
    diary = Diary()
    world.cache.attach_storage_backend(PageStore(diary))
    serve(world, hand, LONGER)
    keys = page_keys(world.namespace.fingerprint, LONGER, PAGE)
    chain = [keys[start : start + 32] for start in range(0, len(keys), 32)]
    for pool in MODELS[model].pools:
        assert [key.page for key in diary.written if key.pool == pool.name] == chain
    world.cache.detach_storage_backend()
    world.cache.attach_storage_backend(PageStore(diary))
    serve(world, hand, LONGER)
    assert len(diary.written) == len(chain) * len(MODELS[model].pools), "what is there is not written again"


def test_a_store_that_goes_and_comes_while_pages_are_on_their_way():
    """Stores, queries and fetches that were begun end in the old store; no page is wrong, no pin is left."""
    hand, old, new = HandExecutor(), Diary(), Diary()
    world = World(executor=hand, backend=old, device_pages=32)
    serve(world, hand, PROMPT)
    for tier in (Tier.DEVICE, Tier.HOST):
        world.cache.evict(tier)
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    hand.run(count=1)
    world.cache.poll()
    world.cache.detach_storage_backend()
    assert ticket.done
    world.cache.attach_storage_backend(PageStore(new))
    hand.settle(world.cache.poll)
    match = world.cache.match_prefix(PROMPT, world.namespace, ticket)
    load = world.cache.load_back(match)
    hand.settle(world.cache.poll)
    assert load.result() == 6 * PAGE, "what was on its way has landed"
    world.check(match)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()
    assert len(new.written) == 6
