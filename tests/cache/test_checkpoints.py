"""A request has live states of its own; snapshots are lent where it asks, shared when it says so, and go one by one."""

import numpy as np
import pytest

from hicache.errors import InvariantError
from hicache.testing.streams import VirtualEvent
from hicache.transfer import Load
from hicache.units import HOLE, Tier
from tests.hand import HandExecutor
from tests.world import MODELS, PAGE, THREE_POOLS, World, tokens

PROMPT = tokens(*range(4 * PAGE + 1))


def free(world: World, pool: str = "state") -> int:
    return world.cache.controller.state.available(pool, Tier.DEVICE)


def snapshots(world: World, text: bytes) -> list[int]:
    """The boundaries at which the device has a snapshot of a text."""
    tree = world.cache.controller.state.tree
    found = tree.match(world.namespace.fingerprint, text)
    return (np.flatnonzero(tree.slots(found, "state", Tier.DEVICE, 0, found.pages) != HOLE) + 1).tolist()


@pytest.fixture
def world() -> World:
    return World(THREE_POOLS)


def test_the_first_allocation_lends_a_live_slot_and_release_takes_it_back(world: World):
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert match.live_slots == {}
    before = free(world)
    assert world.cache.allocate(match, 0) == {}
    assert set(match.live_slots) == {"state"}
    assert free(world) == before - 1
    live = match.live_slots
    lent = world.cache.allocate(match, PAGE + 1)
    assert lent is not None
    assert set(lent) == {"kv", "swa"}
    assert match.live_slots == live, "one for the whole request"
    assert free(world) == before - 1
    world.cache.audit()
    event = VirtualEvent()
    world.cache.release(match, event)
    world.cache.poll()
    assert free(world) == before - 1, "its computation still writes to it"
    event.passed = True
    world.cache.poll()
    assert free(world) == before
    world.idle()


@pytest.mark.parametrize("model", ["one", "derived"])
def test_models_without_states_have_no_live_slots(model):
    world = World(MODELS[model])
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.cache.allocate(match, 2 * PAGE, checkpoint=True) is not None
    assert match.live_slots == {}
    assert set(match.lent) == {"kv"}
    world.cache.drop_checkpoint(match, 2)
    world.cache.release(match)
    world.idle()


@pytest.mark.parametrize(("new_tokens", "boundary"), [(PAGE - 1, 0), (PAGE, 1), (3 * PAGE - 1, 2), (3 * PAGE, 3)])
def test_a_checkpoint_is_lent_for_the_last_boundary(world: World, new_tokens, boundary):
    match = world.cache.match_prefix(PROMPT, world.namespace)
    lent = world.cache.allocate(match, new_tokens, checkpoint=True)
    run = match.slots("state")
    assert len(run) == match.page_count
    assert (np.flatnonzero(run != HOLE) + 1).tolist() == ([boundary] if boundary else [])
    if boundary:
        assert lent["state"].tolist() == [run[boundary - 1]]
        assert run[boundary - 1] != match.live_slots["state"]
    world.cache.audit()
    world.cache.release(match)
    world.idle()


def test_a_checkpoint_behind_the_last_new_page_needs_no_new_page(world: World):
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.cache.allocate(match, 2 * PAGE + 1) is not None
    assert world.cache.allocate(match, 1, checkpoint=True).keys() == {"state"}
    assert world.cache.allocate(match, 0, checkpoint=True) == {}, "the account has one there"
    assert np.flatnonzero(match.slots("state") != HOLE).tolist() == [1]
    world.cache.release(match)
    world.idle()


def test_no_checkpoint_is_lent_where_the_tree_has_one_or_one_is_loading(world: World):
    world.serve(PROMPT)
    world.settle()
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.cache.allocate(match, 1, checkpoint=True).keys() == {"kv", "swa"}
    world.cache.release(match)
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    world.cache.load_back(match)
    assert match.loading
    assert world.cache.allocate(match, 1, checkpoint=True).keys() == {"kv", "swa"}
    world.cache.release(match)
    world.settle()
    world.idle()


def test_a_state_pool_that_is_full_lends_nothing_in_any_pool(world: World):
    taken = world.cache.controller.mem_pool_host.reserve({"state": free(world) - 1}, Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.cache.allocate(match, 2 * PAGE, checkpoint=True) is None
    assert match.page_count == 0
    assert match.live_slots == {}
    assert free(world) == 1
    assert world.cache.allocate(match, 2 * PAGE) is not None
    assert world.cache.allocate(match, 0, checkpoint=True) is None
    taken.cancel()
    world.cache.release(match)
    world.idle()


def test_snapshots_that_are_kept_go_along_later_or_are_dropped(world: World):
    """A request that decodes shares its pages at once and keeps one snapshot that moves along."""
    match = world.cache.match_prefix(PROMPT, world.namespace)
    text = b""
    before = free(world)
    for number in range(6 * PAGE):
        text += tokens(number)
        page, rest = divmod(number + 1, PAGE)
        if not rest and page > 1:
            world.cache.drop_checkpoint(match, page - 1)
        assert world.decode(match, text, checkpoint=not rest, checkpoints=False)
        world.check(match)
        assert free(world) == before - 1 - int(page > 0)
        world.cache.audit()
    assert match.shared_tokens == 6 * PAGE
    assert snapshots(world, text) == []
    assert world.cached(text) == (0, 0)
    slot = match.slots("state")[5]
    world.cache.insert(match, text)
    assert snapshots(world, text) == [6]
    assert match.slots("state")[5] == slot
    assert world.cached(text + tokens(0)) == (6 * PAGE, 6 * PAGE)
    world.cache.release(match)
    world.settle()
    world.idle()
    assert world.cache.stats().counters["backup_pages"] == 6 + 6 + 1


def test_a_dropped_checkpoint_is_free_at_once_and_may_be_lent_again(world: World):
    match = world.cache.match_prefix(PROMPT, world.namespace)
    before = free(world)
    assert world.allocate(match, 2 * PAGE)
    world.cache.drop_checkpoint(match, 1)
    assert free(world) == before - 2
    world.cache.drop_checkpoint(match, 2)
    assert free(world) == before - 1
    world.cache.drop_checkpoint(match, 2)
    assert free(world) == before - 1
    world.cache.audit()
    assert world.cache.allocate(match, 0, checkpoint=True).keys() == {"state"}
    world.cache.release(match)
    with pytest.raises(InvariantError, match="was released"):
        world.cache.drop_checkpoint(match, 2)
    world.idle()


@pytest.mark.parametrize("late", [False, True])
def test_of_two_snapshots_of_one_page_the_later_one_is_given_back(world: World, late):
    one, other = (world.cache.match_prefix(PROMPT, world.namespace) for _ in range(2))
    before = free(world)
    for match in (one, other):
        assert world.decode(match, PROMPT[: 3 * PAGE * 4], checkpoint=True, checkpoints=False)
    assert snapshots(world, PROMPT) == []
    assert one.slots("state")[2] != other.slots("state")[2]
    assert free(world) == before - 4
    world.cache.insert(one, PROMPT[: 3 * PAGE * 4])
    kept = one.slots("state")[2]
    event = VirtualEvent()
    assert other.slots("state")[2] != kept, "its own goes before what the tree has: it may be writing to it"
    world.cache.insert(other, PROMPT[: 3 * PAGE * 4], event if late else None)
    assert other.slots("state")[2] == kept
    assert free(world) == before - 4 + (0 if late else 1)
    world.cache.audit()
    event.passed = True
    world.cache.poll()
    assert free(world) == before - 3
    for match in (one, other):
        world.cache.release(match)
    world.settle()
    world.idle()


def test_a_snapshot_for_pages_that_somebody_shared_without_one(world: World):
    """Pages are in the tree, the hit ends at no snapshot: whoever computes them again gives the tree one."""
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.decode(match, PROMPT)
    world.cache.release(match)
    assert world.cached(PROMPT) == (0, 0)
    again = world.cache.match_prefix(PROMPT, world.namespace)
    assert again.known_tokens == 4 * PAGE
    assert world.decode(again, PROMPT, checkpoint=True)
    assert snapshots(world, PROMPT) == [4]
    assert world.cached(PROMPT) == (4 * PAGE, 4 * PAGE)
    assert world.cache.stats().counters["kv_hit_without_state"] == 4 * PAGE
    world.cache.release(again)
    world.settle()
    world.idle()


def test_tokens_without_a_state_count_once_and_only_behind_the_hit(world: World):
    def lost() -> int:
        return world.cache.stats().counters["kv_hit_without_state"]

    world.serve(PROMPT[: (2 * PAGE + 1) * 4])
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert match.known_tokens == match.device_tokens == 2 * PAGE
    assert world.decode(match, PROMPT)
    world.cache.release(match)
    assert lost() == 0
    world.cache.release(world.cache.match_prefix(PROMPT, world.namespace))
    assert lost() == 0, "it was not used"
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert (match.known_tokens, match.device_tokens) == (4 * PAGE, 2 * PAGE)
    for _ in range(3):
        world.finish_load(match)
        assert world.allocate(match, 1)
    assert lost() == 2 * PAGE
    world.cache.release(match)
    world.settle()
    world.cache.evict(Tier.DEVICE)
    world.cache.release(world.prefill(PROMPT))
    assert lost() == 4 * PAGE, "copies on the host count too"
    world.serve(PROMPT)
    assert lost() == 4 * PAGE
    world.settle()
    world.idle()


def test_a_snapshot_that_lies_ahead_waits_until_its_page_is_shared(world: World):
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.allocate(match, 3 * PAGE)
    ahead = match.slots("state")[2]
    for pages in (1, 2):
        world.compute(match, PROMPT[: 4 * pages * PAGE])
        world.cache.insert(match, PROMPT[: 4 * pages * PAGE])
        world.cache.audit()
        assert match.slots("state").tolist() == [HOLE, HOLE, ahead]
        assert snapshots(world, PROMPT) == []
    world.compute(match, PROMPT[: 4 * 3 * PAGE])
    world.cache.insert(match, PROMPT[: 4 * 3 * PAGE])
    assert snapshots(world, PROMPT) == [3]
    world.cache.release(match)
    assert world.cached(PROMPT) == (3 * PAGE, 3 * PAGE)
    world.settle()
    world.idle()


def test_a_load_makes_snapshots_void_that_were_lent_before_it(world: World):
    """The request goes on from further on, and never computes what they were for."""
    world.serve(PROMPT)
    world.settle()
    world.cache.evict(Tier.DEVICE)
    before = free(world)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.cache.allocate(match, 2 * PAGE, checkpoint=True) is not None
    assert np.flatnonzero(match.slots("state") != HOLE).tolist() == [1]
    assert world.finish_load(match) is not None
    assert np.flatnonzero(match.slots("state") != HOLE).tolist() == [3]
    assert world.decode(match, PROMPT, checkpoint=True)
    world.check(match)
    assert snapshots(world, PROMPT) == [4]
    assert free(world) == before - 2, "the live state and what was loaded"
    world.cache.release(match)
    world.settle()
    world.idle()


def test_a_load_that_comes_short_makes_snapshots_void_and_keeps_the_live_slot():
    hand = HandExecutor()
    world = World(THREE_POOLS, executor=hand)
    world.serve(PROMPT[: (2 * PAGE + 1) * 4])
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    assert load is not None
    text = PROMPT + tokens(*range(PAGE))
    assert world.cache.allocate(match, PAGE + 1, checkpoint=True) is not None
    live = match.live_slots
    assert np.flatnonzero(match.slots("state") != HOLE).tolist() == [3, 4]
    hand.run(Load, bad={"state": [0]})
    assert load.result() == 0, "the snapshot at 2 was not asked for"
    assert match.live_slots == live
    assert not np.any(match.slots("state") != HOLE)
    world.cache.audit()
    again = world.cache.load_back(match)
    hand.run(Load)
    assert again is not None
    assert again.result() == 2 * PAGE
    world.check(match)
    assert world.decode(match, text, checkpoint=True)
    world.check(match)
    assert snapshots(world, text) == [2, 5]
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()
