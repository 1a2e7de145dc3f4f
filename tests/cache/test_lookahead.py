"""Where a draft looks ahead, a page is what its tokens and the next ones say: in tree, storage and every count."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.builder import ModelDescription
from hicache.errors import ConfigError
from hicache.storage.memory import MemoryBackend
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import DERIVED, ONE_POOL, PAGE, THREE_POOLS, World, namespace, tokens


class Shelf(MemoryBackend):
    """A memory store that outlives its attachments, as one on disk does."""

    def close(self) -> None:
        """Keeps everything."""


def world_of(lookahead: int, model: ModelDescription = ONE_POOL, **settings) -> World:
    return World(replace(model, draft_lookahead=lookahead), executor=HandExecutor(), **settings)


def settled(world: World) -> None:
    world.executor.settle(world.cache.poll)


def resumed(world: World, prompt: bytes, ticket=None) -> int:
    """How far a prompt can be resumed once its pages have come; every byte of that is checked."""
    match = world.cache.match_prefix(prompt, world.namespace, ticket)
    load = world.cache.load_back(match)
    settled(world)
    length = load.result()
    world.check(match)
    world.cache.release(match)
    return length


def fetched(world: World, prompt: bytes) -> int:
    ticket = world.cache.prefetch(prompt, world.namespace)
    settled(world)
    return resumed(world, prompt, ticket)


@pytest.mark.parametrize("model", [ONE_POOL, DERIVED])
@pytest.mark.parametrize(("lookahead", "hit"), [(0, 2), (1, 1), (2, 1), (PAGE, 1), (PAGE + 1, 0)])
def test_a_page_that_differs_in_what_follows_is_another_page(model, lookahead, hit):
    """Two prompts share two pages and one token; the token after the second page differs."""
    shelf = Shelf()
    one = tokens(*range(2 * PAGE), *range(100, 120))
    other = tokens(*range(2 * PAGE), *range(200, 220))
    world = world_of(lookahead, model, backend=shelf)
    world.serve(one)
    settled(world)
    assert resumed(world, one) == (2 * PAGE + 20 - max(1, lookahead)) // PAGE * PAGE
    assert resumed(world, other) == hit * PAGE
    world.serve(other)
    settled(world)
    world.idle()
    world.cache.evict(Tier.DEVICE)
    for prompt in (one, other):
        assert resumed(world, prompt) == (2 * PAGE + 20 - max(1, lookahead)) // PAGE * PAGE
    world.cache.close()
    world = world_of(lookahead, model, backend=shelf)
    third = tokens(*range(2 * PAGE), *range(300, 320))
    assert fetched(world, third) == hit * PAGE
    assert fetched(world, other) == (2 * PAGE + 20 - max(1, lookahead)) // PAGE * PAGE
    world.idle()
    world.cache.close()


@pytest.mark.parametrize("model", [ONE_POOL, THREE_POOLS])
def test_a_page_is_shared_only_once_the_tokens_after_it_are_known(model):
    world = world_of(2, model)
    text = tokens(*range(3 * PAGE + 2))
    match = world.cache.match_prefix(text[: 4 * PAGE], world.namespace)
    for length, pages in ((PAGE, 0), (PAGE + 1, 0), (PAGE + 2, 1), (2 * PAGE + 1, 1), (3 * PAGE + 2, 3)):
        grown = text[: 4 * length]
        assert world.allocate(match, length - match.length_tokens, checkpoint=True)
        world.compute(match, grown)
        world.cache.insert(match, grown)
        assert match.shared_tokens == pages * PAGE, length
        assert match.page_count == -(-length // PAGE), "slots are kept for the pages that are not shared yet"
        world.cache.audit()
    world.cache.release(match)
    settled(world)
    assert world.cached(text)[0] == 3 * PAGE
    assert world.cached(text[: 4 * (3 * PAGE + 1)])[0] == 2 * PAGE, "the last page of this prompt may be another"
    world.idle()


def test_a_prompt_shorter_than_its_lookahead_has_no_page():
    world = world_of(3 * PAGE, backend=Shelf())
    for length in (0, 1, 2 * PAGE, 4 * PAGE - 1):
        prompt = tokens(*range(length))
        assert world.cache.prefetch(prompt, world.namespace).done
        match = world.cache.match_prefix(prompt, world.namespace)
        assert match.length_tokens == 0
        assert world.cache.allocate(match, length) is not None
        world.cache.insert(match, prompt)
        assert match.shared_tokens == 0
        world.cache.release(match)
    settled(world)
    world.idle()


def test_a_namespace_and_its_cache_look_ahead_alike():
    world = world_of(1, backend=Shelf())
    foreign = namespace(ONE_POOL)
    for call in (world.cache.match_prefix, world.cache.prefetch):
        with pytest.raises(ConfigError, match=r"the namespace has draft_lookahead=0, .* with draft_lookahead=1"):
            call(tokens(1), foreign)
    with pytest.raises(ConfigError, match=r"draft_lookahead=1, .* draft_lookahead=0"):
        World().cache.match_prefix(tokens(1), world.namespace)
    assert foreign.fingerprint != replace(foreign, draft_lookahead=1).fingerprint


def pages_of(text: tuple[int, ...], lookahead: int) -> list[tuple[int, ...]]:
    """Every page that is known whole, told by all that it depends on."""
    ends = range(PAGE + lookahead, len(text) + 1, PAGE)
    return [text[:end] for end in ends]


TEXTS = st.lists(st.integers(0, 1), max_size=4 * PAGE + 3).map(tuple)


@given(st.integers(0, PAGE + 1), st.lists(TEXTS, min_size=1, max_size=6), st.lists(TEXTS, min_size=1, max_size=4))
def test_hits_are_those_of_a_plain_model_in_every_tier(lookahead, served, asked):
    shelf = Shelf()
    world = world_of(lookahead, device_pages=64, host_pages=64, backend=shelf)
    known: set[tuple[int, ...]] = set()

    def expected(prompt: tuple[int, ...]) -> int:
        whole = pages_of(prompt, lookahead)[: max(0, len(prompt) - 1) // PAGE]
        return PAGE * next((count for count, page in enumerate(whole) if page not in known), len(whole))

    for text in served:
        assert resumed(world, tokens(*text)) == expected(text)
        world.serve(tokens(*text))
        settled(world)
        known.update(pages_of(text, lookahead))
    for prompt in asked:
        assert world.cached(tokens(*prompt))[0] == expected(prompt)
    for prompt in asked:
        world.cache.evict(Tier.DEVICE)
        assert world.cached(tokens(*prompt)) == (0, expected(prompt))
        assert resumed(world, tokens(*prompt)) == expected(prompt)
    world.cache.close()
    for prompt in asked:
        world = world_of(lookahead, device_pages=64, host_pages=64, backend=shelf)
        assert fetched(world, tokens(*prompt)) == expected(prompt)
        world.idle()
        world.cache.close()
