"""S10 through the cache: another namespace has nothing cached, in no tier, however much the tokens agree."""

from dataclasses import replace

import pytest

from hicache.keys import Namespace, adapter_identity
from hicache.storage.memory import MemoryBackend
from hicache.units import Tier
from tests.world import PAGE, World, namespace, tokens

PROMPT = tokens(*range(4 * PAGE + 1))
BASE = namespace()

OTHERS: dict[str, Namespace] = {
    "other weights": replace(BASE, weights="1" * 64),
    "other adapter": BASE.with_adapter(adapter_identity("a", "w1", 1.0)),
    "reloaded under the same name": BASE.with_adapter(adapter_identity("a", "w2", 1.0)),
    "other scale": BASE.with_adapter(adapter_identity("a", "w1", 2.0)),
    "adapter X": BASE.with_adapter("X"),
    "salt X": BASE.with_salt("X"),
    "a, bc": replace(BASE, adapter="a", salt="bc"),
    "ab, c": replace(BASE, adapter="ab", salt="c"),
    "other shard": replace(BASE, shard="1/2"),
}


@pytest.mark.parametrize("where", ["device", "host", "storage"])
def test_nothing_of_one_namespace_is_cached_for_another(where):
    world = World(backend=MemoryBackend(), device_pages=64, host_pages=64)
    served: list[Namespace] = []

    def cached(owner: Namespace) -> dict[str, int]:
        world.namespace = owner
        ticket = world.cache.prefetch(PROMPT, owner)
        world.settle()
        match = world.cache.match_prefix(PROMPT, owner, ticket)
        world.finish_load(match)
        world.check(match)
        match_cached = dict(match.cached_tokens)
        assert world.allocate(match, len(PROMPT) // 4 - match.length_tokens)
        world.compute(match, PROMPT)
        world.cache.release(world.cache.insert(match, PROMPT))
        world.settle()
        return match_cached

    def forget() -> None:
        for tier in {"device": [], "host": [Tier.DEVICE], "storage": [Tier.DEVICE, Tier.HOST]}[where]:
            world.cache.evict(tier)

    for name, owner in {"base": BASE, **OTHERS}.items():
        assert sum(cached(owner).values()) == 0, name
        served.append(owner)
        forget()
    for owner in served:
        found = cached(owner)
        assert found == {"device": 0, "host": 0, "storage": 0} | {where: 4 * PAGE}
        forget()
    world.idle()


def test_an_empty_salt_is_no_salt():
    world = World()
    world.serve(PROMPT)
    assert world.cached(PROMPT)[0] == 4 * PAGE
    world.namespace = BASE.with_salt("")
    assert world.cached(PROMPT)[0] == 4 * PAGE


def test_tokens_that_differ_share_only_what_lies_before():
    world = World(backend=MemoryBackend())
    world.serve(PROMPT)
    for position in range(4 * PAGE):
        ids = list(range(4 * PAGE + 1))
        ids[position] += 1
        assert world.cached(tokens(*ids))[0] == position // PAGE * PAGE
