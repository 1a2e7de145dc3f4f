"""S11: every length makes the round trip through host and storage, and the hit is right and never shrinks with it."""

import pytest

from hicache.storage.memory import MemoryBackend
from hicache.units import Tier
from tests.world import KINDS, PAGE, World, tokens

SOME = [*range(1, 41)]
LONG = [*range(47, 300, 36), 299, 300]


def text(pages: int) -> bytes:
    """A prompt of which `pages` full pages can be cached."""
    return tokens(*range(pages * PAGE + 1))


def settle(world: World) -> None:
    for _ in range(3):
        world.cache.poll()


@pytest.mark.parametrize("model", sorted(KINDS))
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.STORAGE])
def test_prompts_of_many_lengths_come_back(model, tier):
    round_trips(model, tier, SOME + LONG if model == "one" else SOME)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", sorted(KINDS))
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.STORAGE])
def test_prompts_of_every_length_come_back(model, tier):
    round_trips(model, tier, list(range(1, 301)))


def round_trips(model: str, tier: Tier, lengths: list[int]) -> None:
    most = max(lengths)
    world = World(
        KINDS[model],
        device_pages=most + 2,
        host_pages=most + 2,
        backend=MemoryBackend() if tier is Tier.STORAGE else None,
        batch_pages=32,
    )
    for pages in lengths:
        prompt = text(pages)
        world.serve(prompt)
        settle(world)
        world.cache.evict(Tier.DEVICE)
        ticket = None
        if tier is Tier.STORAGE:
            world.cache.evict(Tier.HOST)
            ticket = world.cache.prefetch(prompt, world.namespace)
            while not ticket.done:
                world.cache.poll()
        match = world.cache.match_prefix(prompt, world.namespace, ticket)
        load = world.cache.load_back(match)
        world.cache.poll()
        assert load.result() == pages * PAGE
        world.check(match)
        cached = match.cached_tokens
        assert cached == {"device": 0, "host": 0, "storage": 0} | {tier.value: pages * PAGE}
        world.cache.release(match)
    settle(world)
    world.idle()


@pytest.mark.parametrize("where", ["device", "host", "storage"])
def test_the_hit_of_every_length_is_its_full_pages_but_for_the_last_token(where):
    pages = 40
    world = World(device_pages=pages + 2, host_pages=pages + 2, backend=MemoryBackend(), batch_pages=8)
    world.serve(text(pages))
    settle(world)
    hits = []
    for length in range(1, pages * PAGE + 2):
        if where != "device":
            world.cache.evict(Tier.DEVICE)
        prompt = text(pages)[: 4 * length]
        if where == "storage":
            world.cache.evict(Tier.HOST)
            ticket = world.cache.prefetch(prompt, world.namespace)
            while not ticket.done:
                world.cache.poll()
        device, usable = world.cached(prompt)
        hits.append(usable)
        assert usable == (length - 1) // PAGE * PAGE
        assert device == (usable if where == "device" else 0)
    assert hits == sorted(hits)
    settle(world)
    world.idle()
