"""S21 through the cache: a page that is cut short is a miss; the request ends by itself, and writes it anew."""

from pathlib import Path

import pytest

from hicache.keys import page_keys
from hicache.storage import chain_keys
from hicache.storage.file import FileBackend
from hicache.transfer import ThreadExecutor
from tests.storage.support import spot
from tests.world import DERIVED, PAGE, World, tokens

PROMPT = tokens(*range(6 * PAGE + 1))


def world_over(folder: Path) -> World:
    return World(DERIVED, backend=FileBackend(folder), executor=ThreadExecutor(), timeout_s=30.0)


def one_request(world: World) -> dict[str, int]:
    """The only traffic there is: it polls for itself."""
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    while not ticket.done:
        world.cache.poll()
    match = world.cache.match_prefix(PROMPT, world.namespace, ticket)
    load = world.cache.load_back(match)
    load.result()
    world.check(match)
    assert world.allocate(match, len(PROMPT) // 4 - match.length_tokens)
    world.compute(match, PROMPT)
    world.cache.insert(match, PROMPT)
    world.check(match)
    cached = dict(match.cached_tokens)
    world.cache.release(match)
    while world.cache.stats().in_flight:
        world.cache.poll()
    world.idle()
    return cached


@pytest.mark.parametrize("left_bytes", [0, 5, 100])
@pytest.mark.parametrize("pool", ["kv", "indexer"])
def test_a_truncated_page_is_computed_and_written_again(tmp_path: Path, left_bytes, pool):
    world = world_over(tmp_path)
    assert sum(one_request(world).values()) == 0
    world.cache.close()
    first = world.namespace.fingerprint
    key = chain_keys(first, pool, first, page_keys(first, PROMPT, PAGE))[3]
    whole = spot(tmp_path, key).content()
    spot(tmp_path, key).overwrite(bytes(len(whole) - left_bytes))
    world = world_over(tmp_path)
    assert one_request(world) == {"device": 0, "host": 0, "storage": 3 * PAGE}
    stats = world.cache.stats().storage
    assert stats.written_pages == 1, "the other pages are still good"
    assert spot(tmp_path, key).content() == whole
    world.cache.close()
    world = world_over(tmp_path)
    assert one_request(world)["storage"] == 6 * PAGE
    world.cache.close()
