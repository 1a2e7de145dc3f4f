"""A match is a request's account: what it was lent is its own until it is inserted or released, at any point."""

import numpy as np
import pytest

from hicache.cache import Match
from hicache.errors import InvariantError
from hicache.testing.streams import VirtualEvent
from hicache.units import HOLE, Tier
from tests.world import DERIVED, KINDS, MODELS, PAGE, THREE_POOLS, World, tokens

PROMPT = tokens(*range(4 * PAGE + 1))


def free(world: World, tier: Tier = Tier.DEVICE) -> dict[str, int]:
    return {pool.pool: pool.free for pool in world.cache.stats().pools if pool.tier is tier}


@pytest.fixture(params=sorted(MODELS))
def world(request) -> World:
    return World(MODELS[request.param])


def test_allocation_is_cumulative_and_by_the_page(world: World):
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert match.page_count == 0
    first = world.cache.allocate(match, PAGE - 1)
    assert len(first["kv"]) == 1
    assert world.cache.allocate(match, 1) == {}, "the last page has room for one more token"
    second = world.cache.allocate(match, PAGE + 1)
    assert len(second["kv"]) == 2
    assert match.length_tokens == 2 * PAGE + 1
    assert match.page_count == 3
    np.testing.assert_array_equal(match.slots(), np.concatenate((first["kv"], second["kv"])))
    world.cache.audit()
    world.cache.release(match)
    world.idle()


def test_slots_are_by_page_in_every_pool():
    world = World(THREE_POOLS)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    lent = world.cache.allocate(match, 4 * PAGE + 1, checkpoint=True)
    assert {pool: len(slots) for pool, slots in lent.items()} == {"kv": 5, "swa": 5, "state": 1}
    state = match.slots("state")
    assert len(state) == 5
    assert state[3] == lent["state"][0], "the snapshot belongs to the last full page"
    assert np.count_nonzero(state != HOLE) == 1
    world.cache.release(match)
    world.idle()


def test_a_full_device_lends_nothing_and_takes_nothing(world: World):
    one = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.cache.allocate(one, 15 * PAGE) is not None
    other = world.cache.match_prefix(tokens(1, 2), world.namespace)
    before = free(world)
    assert world.cache.allocate(other, 2 * PAGE) is None
    assert other.page_count == 0
    assert free(world) == before
    assert world.cache.allocate(other, PAGE) is not None
    world.cache.audit()
    world.cache.release(one)
    world.cache.release(other)
    world.idle()


def test_inserted_pages_are_shared_and_the_partial_page_stays_the_requests(world: World):
    match = world.prefill(PROMPT)
    assert match.page_count == 5
    assert {pool: int((run != HOLE).sum()) for pool, run in match.lent.items()}["kv"] == 1
    assert world.cached(PROMPT) == (4 * PAGE, 4 * PAGE)
    other = world.cache.match_prefix(PROMPT, world.namespace)
    np.testing.assert_array_equal(other.slots(), match.slots()[:4])
    world.cache.release(match)
    world.check(other)
    world.cache.release(other)
    world.settle()
    world.idle()


def test_decoding_fills_pages_and_shares_them(world: World):
    world.cache.release(world.prefill(PROMPT))
    match = world.prefill(PROMPT)
    text = PROMPT
    for number in range(3 * PAGE):
        text += tokens(100 + number)
        assert world.decode(match, text)
        world.check(match)
        world.cache.audit()
    assert match.page_count == 8
    world.cache.release(match)
    world.settle()
    world.idle()
    expected = 6 if world.model is not THREE_POOLS else 4
    assert world.cached(text[: 7 * PAGE * 4])[0] == expected * PAGE, "snapshots are taken where a prefill ends"
    again = world.cache.match_prefix(text, world.namespace)
    world.check(again)
    world.cache.release(again)


def test_duplicates_are_used_from_the_tree_and_freed_once_their_computation_has_passed(world: World):
    one = world.cache.match_prefix(PROMPT, world.namespace)
    other = world.cache.match_prefix(PROMPT, world.namespace)
    for match in (one, other):
        assert world.allocate(match, 4 * PAGE + 1)
        world.compute(match, PROMPT)
    world.cache.insert(one, PROMPT)
    own = other.slots().copy()
    before = free(world)
    event = VirtualEvent()
    other = world.cache.insert(other, PROMPT, event)
    np.testing.assert_array_equal(other.slots()[:4], one.slots()[:4])
    assert other.slots()[4] == own[4]
    assert free(world) == before, "the computation may still read its own pages"
    world.cache.audit()
    world.cache.poll()
    assert free(world) == before
    event.passed = True
    world.cache.poll()
    assert free(world)["kv"] == before["kv"] + 4
    world.cache.audit()
    world.cache.release(one)
    world.cache.release(other)
    world.settle()
    world.idle()


def _matched(world: World) -> Match:
    return world.cache.match_prefix(PROMPT, world.namespace)


def _allocated(world: World) -> Match:
    match = _matched(world)
    assert world.allocate(match, len(PROMPT) // 4 - match.length_tokens)
    return match


def _inserted(world: World) -> Match:
    match = _allocated(world)
    world.compute(match, PROMPT)
    return world.cache.insert(match, PROMPT)


def _allocated_again(world: World) -> Match:
    match = _inserted(world)
    assert world.allocate(match, 2 * PAGE)
    return match


def _loading(world: World) -> Match:
    match = _matched(world)
    world.cache.load_back(match)
    return match


def _loading_and_allocated(world: World) -> Match:
    match = _loading(world)
    assert world.allocate(match, PAGE)
    return match


def _loaded(world: World) -> Match:
    match = _matched(world)
    world.finish_load(match)
    return match


def _kept_snapshot(world: World) -> Match:
    match = _loaded(world)
    assert world.decode(match, PROMPT, checkpoint=True, checkpoints=False)
    assert world.decode(match, PROMPT + tokens(*range(2 * PAGE)), checkpoint=True, checkpoints=False)
    return match


def _loaded_again(world: World) -> Match:
    match = _allocated(world)
    world.finish_load(match)
    return match


STAGES = [
    _matched,
    _allocated,
    _inserted,
    _allocated_again,
    _loading,
    _loading_and_allocated,
    _loaded,
    _kept_snapshot,
    _loaded_again,
]


@pytest.mark.parametrize("model", sorted(KINDS))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("late", [False, True])
def test_an_abort_at_any_point_is_one_release(model, stage, late):
    world = World(KINDS[model])
    world.serve(PROMPT)
    world.settle()
    world.cache.evict(Tier.DEVICE)
    event = VirtualEvent() if late else None
    match = stage(world)
    world.cache.audit()
    world.cache.release(match, event)
    world.cache.audit()
    if event is not None:
        world.settle()
        world.cache.audit()
        event.passed = True
    world.settle()
    world.idle()
    assert world.free_and_evictable(Tier.DEVICE) == world.device_pages
    assert world.free_and_evictable(Tier.HOST) == world.host_pages
    world.serve(PROMPT)


def test_a_released_match_is_of_no_use_any_more(world: World):
    match = world.prefill(PROMPT)
    world.cache.release(match)
    for use in (
        lambda: world.cache.release(match),
        lambda: world.cache.allocate(match, PAGE),
        lambda: world.cache.load_back(match),
        lambda: world.cache.insert(match, PROMPT),
        lambda: match.slots(),
    ):
        with pytest.raises(InvariantError, match="was released; match the prefix again"):
            use()
    world.settle()
    world.idle()


def test_tokens_without_slots_are_not_inserted(world: World):
    match = world.prefill(PROMPT)
    with pytest.raises(InvariantError, match="8 pages of tokens, but the match has slots for 5"):
        world.cache.insert(match, PROMPT + PROMPT[: 4 * PAGE * 4])
    world.cache.audit()
    world.cache.release(match)
    world.settle()
    world.idle()


def test_hits_and_lookups_count_once_however_often_a_prompt_is_matched(world: World):
    world.serve(PROMPT)
    world.settle()
    before = world.cache.stats()
    for _ in range(3):
        world.cache.release(world.cache.match_prefix(PROMPT, world.namespace))
    assert world.cache.stats().lookup_tokens == before.lookup_tokens, "a match that is not used is no lookup"
    match = world.cache.match_prefix(PROMPT, world.namespace)
    for _ in range(3):
        world.finish_load(match)
    for _ in range(3):
        assert world.allocate(match, 1)
    stats = world.cache.stats()
    assert stats.lookup_tokens - before.lookup_tokens == 4 * PAGE + 1
    assert stats.hit_tokens[Tier.DEVICE] - before.hit_tokens[Tier.DEVICE] == 4 * PAGE
    assert stats.hit_tokens[Tier.HOST] == before.hit_tokens[Tier.HOST]
    world.cache.release(match)


def test_host_hits_count_once_however_often_they_are_loaded(world: World):
    world.serve(PROMPT)
    world.settle()
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    for _ in range(3):
        world.finish_load(match)
    assert match.cached_tokens == {"device": 0, "host": 4 * PAGE, "storage": 0}
    assert world.cache.stats().hit_tokens[Tier.HOST] == 4 * PAGE
    assert world.cache.stats().hit_rate == 4 * PAGE / (2 * (4 * PAGE + 1))
    world.cache.release(match)
    world.idle()


def test_at_least_one_token_is_left_to_compute(world: World):
    world.serve(PROMPT)
    assert world.cached(PROMPT[: 4 * PAGE * 4])[0] <= 3 * PAGE
    assert world.cached(b"") == (0, 0)
    empty = world.cache.match_prefix([], world.namespace)
    world.cache.release(empty)
    world.settle()
    world.idle()


def test_packed_drafts_and_derived_pools_have_no_slots_of_their_own():
    world = World(DERIVED)
    match = world.prefill(PROMPT)
    assert set(match.lent) == {"kv"}
    world.cache.release(match)
    world.settle()
    world.idle()
