"""A load brings its pages once, whoever waits for it; what it promised is there, or the result says how much is."""

import numpy as np
import pytest

from hicache.cache import Load as CacheLoad
from hicache.cache import Match
from hicache.errors import InvariantError
from hicache.testing.streams import VirtualEvent
from hicache.transfer import Backup, LayerProgress, Load
from hicache.units import HOLE, Tier
from tests.hand import HandExecutor
from tests.world import MODELS, PAGE, THREE_POOLS, World, tokens

PROMPT = tokens(*range(6 * PAGE + 1))


def on_host(model: str = "one", **settings) -> tuple[World, HandExecutor]:
    """A world that has the prompt on the host only."""
    hand = HandExecutor()
    world = World(MODELS[model], executor=hand, **settings)
    world.serve(PROMPT)
    for _ in range(2):
        world.cache.evict(Tier.DEVICE)
        hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    assert world.cached(PROMPT)[0] < world.cached(PROMPT)[1] == 6 * PAGE
    return world, hand


def computes(world: World, match: Match, prompt: bytes = PROMPT) -> None:
    assert world.allocate(match, len(prompt) // 4 - match.length_tokens)
    world.compute(match, prompt)
    world.cache.insert(match, prompt)
    world.check(match)


def ends(world: World, hand: HandExecutor, *matches: Match) -> None:
    for match in matches:
        world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()
    assert world.free_and_evictable(Tier.DEVICE) == world.device_pages
    assert world.free_and_evictable(Tier.HOST) == world.host_pages


@pytest.mark.parametrize("model", sorted(MODELS))
def test_slots_are_known_at_once_and_bytes_come_later(model):
    world, hand = on_host(model)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert (match.device_tokens, match.host_tokens) == (0, 6 * PAGE)
    load = world.cache.load_back(match)
    assert load.tokens == match.length_tokens == 6 * PAGE
    slots = match.slots().copy()
    assert not np.any(slots == HOLE)
    assert not load.done
    world.cache.audit()
    with pytest.raises(InvariantError, match="has not settled"):
        world.cache.insert(match, PROMPT)
    hand.run(Load)
    assert load.done
    assert load.result() == 6 * PAGE
    np.testing.assert_array_equal(match.slots(), slots)
    assert match.cached_tokens == {"device": 0, "host": 6 * PAGE, "storage": 0}
    world.check(match)
    ends(world, hand, match)


def test_a_short_result_stays_short_when_slots_are_lent_beyond_it():
    world, hand = on_host()
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    hand.run(Load, bad={"kv": [2]})
    world.cache.poll()
    assert world.cache.allocate(match, 4 * PAGE + 1) is not None
    assert load.result() == 2 * PAGE < load.tokens
    ends(world, hand, match)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_two_requests_share_one_load(model):
    world, hand = on_host(model)
    one, other = (world.cache.match_prefix(PROMPT, world.namespace) for _ in range(2))
    first, second = world.cache.load_back(one), world.cache.load_back(other)
    assert len(hand.of(Load)) == 1
    np.testing.assert_array_equal(one.slots(), other.slots())
    hand.run(Load)
    assert (first.result(), second.result()) == (6 * PAGE, 6 * PAGE)
    computes(world, one)
    computes(world, other)
    ends(world, hand, one, other)


def test_a_longer_prompt_joins_what_is_loading_and_loads_the_rest():
    world, hand = on_host()
    short = world.cache.match_prefix(PROMPT[: (3 * PAGE + 1) * 4], world.namespace)
    long = world.cache.match_prefix(PROMPT, world.namespace)
    first, second = world.cache.load_back(short), world.cache.load_back(long)
    loads = hand.of(Load)
    assert [len(load.plan.layers[0][0].copy.device_slots) for load in loads] == [3, 3]
    np.testing.assert_array_equal(short.slots(), long.slots()[:3])
    world.cache.release(short)
    hand.run(Load, count=1)
    assert first.done
    assert not second.done
    hand.run(Load)
    assert second.result() == 6 * PAGE
    computes(world, long)
    ends(world, hand, long)


def test_pages_of_a_joined_load_stay_until_the_rest_has_come():
    """Else they could leave and come back at other slots, and the step would have run on somebody else's."""
    world, hand = on_host(device_pages=8)
    short = world.cache.match_prefix(PROMPT[: (3 * PAGE + 1) * 4], world.namespace)
    long = world.cache.match_prefix(PROMPT, world.namespace)
    world.cache.load_back(short)
    load = world.cache.load_back(long)
    world.cache.release(short)
    slots = long.slots().copy()
    hand.run(Load, count=1)
    world.cache.poll()
    assert world.cache.evict(Tier.DEVICE) == 0
    np.testing.assert_array_equal(long.slots(), slots)
    hand.run(Load)
    assert load.result() == 6 * PAGE
    ends(world, hand, long)


def test_what_a_load_finds_on_the_device_is_not_evicted_to_make_room_for_it():
    """kv is on the host only, one of the two pages in the window still on the device: the load needs room for one."""
    hand = HandExecutor()
    world = World(THREE_POOLS, device_pages=8, executor=hand)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE, pool="kv")
    state = world.cache.controller.state
    state.free_eviction(state.tree.evict("swa", Tier.DEVICE, 5, drop_dirty=False))
    assert world.cached(PROMPT) == (0, 6 * PAGE)
    found = state.tree.match(world.namespace.fingerprint, PROMPT)
    assert (state.tree.slots(found, "swa", Tier.DEVICE, 4, 6) != HOLE).tolist() == [False, True]
    taken = state.group.reserve({"swa": 7}, Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    assert (state.tree.slots(found, "swa", Tier.DEVICE, 4, 6) != HOLE).tolist() == [False, True]
    assert load.tokens == 0, "there is no room for the sixth page of the window"
    taken.cancel()
    assert world.finish_load(match) is not None
    hand.run(Load)
    ends(world, hand, match)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_load_that_comes_short_is_planned_once_more(model):
    world, hand = on_host(model)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    assert world.allocate(match, 1)
    hand.run(Load, bad={"kv": [3]})
    good = load.result()
    assert good <= 3 * PAGE
    assert match.length_tokens == good
    assert world.cache.stats().counters["load_failed"] == 1
    world.check(match)
    again = world.cache.load_back(match)
    hand.run(Load)
    assert again.result() == again.tokens
    world.check(match)
    computes(world, match)
    stats = world.cache.stats()
    assert sum(stats.hit_tokens.values()) == sum(match.cached_tokens.values()) <= 3 * PAGE
    ends(world, hand, match)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_what_ran_on_a_load_that_failed_is_void_though_somebody_computed_the_same_meanwhile(model):
    world, hand = on_host(model)
    match, other = (world.cache.match_prefix(PROMPT, world.namespace) for _ in range(2))
    load = world.cache.load_back(match)
    computes(world, other)
    hand.run(Load, bad={"kv": [3]})
    assert load.tokens == 6 * PAGE
    assert load.result() == 0, "the slots that it ran on are not those that the tree has"
    again = world.cache.load_back(match)
    assert again.result() == again.tokens == 6 * PAGE
    computes(world, match)
    ends(world, hand, match, other)


def test_what_others_lost_of_a_prompt_before_it_is_loaded_is_computed():
    world, hand = on_host()
    shorter = world.cache.match_prefix(PROMPT[: 4 * 3 * PAGE + 4], world.namespace)
    one, other = (world.cache.match_prefix(PROMPT, world.namespace) for _ in range(2))
    load = world.cache.load_back(other)
    hand.run(Load, bad={"kv": [3, 4, 5]})
    assert load.result() == 3 * PAGE
    world.cache.release(other)
    again = world.cache.load_back(one)
    assert again.tokens == again.result() == 3 * PAGE
    computes(world, one)
    ends(world, hand, one, shorter)


def test_after_two_loads_the_hit_is_what_the_device_has():
    world, hand = on_host()
    match = world.cache.match_prefix(PROMPT, world.namespace)
    for bad, good in ((4, 4), (2, 4)):
        load = world.cache.load_back(match)
        hand.run(Load, bad={"kv": [bad]})
        assert load.result() == good * PAGE
    assert world.cache.load_back(match).tokens == 4 * PAGE
    assert not hand.of(Load)
    ends(world, hand, match)


def test_a_short_load_that_nobody_asked_about_is_not_inserted_on():
    world, hand = on_host()
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    assert world.allocate(match, 5 * PAGE)
    hand.run(Load, bad={"kv": [2]})
    world.cache.poll()
    with pytest.raises(InvariantError, match="came short"):
        world.cache.insert(match, PROMPT + tokens(*range(4 * PAGE)))
    assert load.result() == 2 * PAGE
    computes(world, match)
    ends(world, hand, match)


@pytest.mark.parametrize("joined", [False, True])
def test_a_load_that_takes_too_long_is_given_up(joined):
    world, hand = on_host(device_pages=32)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    load.wait(0)
    assert load.result() == 0
    assert world.cache.stats().counters["load_failed"] == 1
    other = world.cache.match_prefix(PROMPT, world.namespace)
    if joined:
        second = world.cache.load_back(other)
        assert len(hand.of(Load)) == 2, "nobody joins a load that is overdue"
    computes(world, match)
    hand.run(Load)
    if joined:
        assert second.result() == 6 * PAGE
        world.check(other)
    ends(world, hand, match, other)


def test_a_load_that_hangs_is_waited_for_once_and_not_for_every_layer(monkeypatch):
    waited = []
    monkeypatch.setattr(LayerProgress, "wait", lambda self, layer, timeout_s: waited.append(timeout_s))
    monkeypatch.setattr(LayerProgress, "wait_end", lambda self, timeout_s: waited.append(timeout_s))
    load = CacheLoad(PAGE, [LayerProgress(3), LayerProgress(3)], 30.0, lambda: 0)
    for layer in range(3):
        load.wait(layer)
    assert load.result() == 0
    assert waited == [30.0] + [0.0] * 7


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_request_that_goes_away_leaves_its_load_to_the_others(model):
    world, hand = on_host(model)
    one, other = (world.cache.match_prefix(PROMPT, world.namespace) for _ in range(2))
    first, second = world.cache.load_back(one), world.cache.load_back(other)
    world.cache.release(one)
    assert first.result() == 0, "and asking for its result changes nothing"
    assert second.result() in (0, 6 * PAGE)
    world.cache.audit()
    ends(world, hand, other)


def test_a_load_that_nobody_waits_for_still_lands():
    world, hand = on_host()
    match = world.cache.match_prefix(PROMPT, world.namespace)
    world.cache.load_back(match)
    world.cache.release(match)
    world.cache.audit()
    hand.run(Load)
    world.cache.poll()
    assert world.cached(PROMPT) == (6 * PAGE, 6 * PAGE)
    hand.settle(world.cache.poll)
    world.idle()


def test_the_source_of_a_load_stays_though_the_device_has_a_copy_meanwhile():
    world, hand = on_host(write_policy="write_back")
    loading, computing = (world.cache.match_prefix(PROMPT, world.namespace) for _ in range(2))
    load = world.cache.load_back(loading)
    computes(world, computing)
    assert world.cache.evict(Tier.HOST) == 0, "the load still reads the host's copy"
    hand.run(Load)
    assert load.result() == 6 * PAGE
    assert world.cache.evict(Tier.HOST) == 6
    ends(world, hand, loading, computing)


def test_loaded_pages_that_somebody_computed_meanwhile_are_freed_once_all_who_ran_on_them_are_done():
    world, hand = on_host()
    one, other, third = (world.cache.match_prefix(PROMPT, world.namespace) for _ in range(3))
    loads = [world.cache.load_back(match) for match in (one, other)]
    ran_on = other.slots().copy()
    computes(world, third)
    hand.run(Load)
    assert [load.result() for load in loads] == [6 * PAGE] * 2
    np.testing.assert_array_equal(one.slots()[:6], third.slots()[:6])
    for match in (one, other):
        assert world.allocate(match, 1)
        world.compute(match, PROMPT)
    world.cache.insert(one, PROMPT)
    world.cache.release(one)
    taken = set(world.cache._device_allocators["kv"].taken().tolist())
    assert taken >= set(ran_on.tolist()), "the other request's step may still read them"
    world.cache.audit()
    event = VirtualEvent()
    world.cache.release(other, event)
    assert set(world.cache._device_allocators["kv"].taken().tolist()) >= set(ran_on.tolist())
    event.passed = True
    world.cache.poll()
    assert not set(world.cache._device_allocators["kv"].taken().tolist()) & set(ran_on.tolist())
    ends(world, hand, third)


def test_loaded_pages_that_somebody_computed_meanwhile_are_free_at_once_where_nothing_can_run_on_them():
    world, hand = on_host()
    one, other = (world.cache.match_prefix(PROMPT, world.namespace) for _ in range(2))
    load = world.cache.load_back(one)
    computes(world, other)
    taken = len(world.cache.taken_slots("kv", Tier.DEVICE))
    hand.run(Load)
    assert load.result() == 6 * PAGE
    assert len(world.cache.taken_slots("kv", Tier.DEVICE)) == taken - 6, "nobody was told of the slots it loaded to"
    world.cache.audit()
    world.cache.release(one)
    ends(world, hand, other)


def test_a_device_without_room_is_asked_again_once_pages_are_written_back():
    world, hand = _full_of_dirty_pages()
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.cache.load_back(match) is None
    assert hand.of(Backup)
    hand.run(Backup)
    world.cache.poll()
    load = world.cache.load_back(match)
    hand.run(Load)
    assert load.result() == 6 * PAGE
    world.check(match)
    ends(world, hand, match)


def _full_of_dirty_pages() -> tuple[World, HandExecutor]:
    hand = HandExecutor()
    world = World(executor=hand, device_pages=7, write_policy="write_back")
    world.serve(PROMPT)
    world.cache.evict(Tier.DEVICE)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    world.serve(tokens(*range(1000, 1000 + 6 * PAGE + 1)))
    assert world.cached(PROMPT) == (0, 6 * PAGE)
    return world, hand


def test_where_there_is_no_room_at_all_the_load_is_what_the_device_has():
    world, hand = on_host(device_pages=7)
    holder = world.cache.match_prefix(tokens(1), world.namespace)
    assert world.allocate(holder, 4 * PAGE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    assert load.done
    assert load.result() == load.tokens == 0
    assert world.cache.stats().counters["load_refused"] == 1
    ends(world, hand, match, holder)
