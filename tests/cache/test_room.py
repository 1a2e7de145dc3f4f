"""What is said to fit fits, what is said to be free can be had, in every pool."""

import pytest

from hicache.cache.room import most_chunk, most_slots
from hicache.coverage import Checkpoint, Full, Window
from hicache.errors import CapacityError
from hicache.units import Tier
from tests.cache.retracting import OTHER, PROMPT, away, empty_device, pools, restored, running
from tests.world import KINDS, ONE_POOL, PAGE, THREE_POOLS, WINDOW, World, tokens

ROOM = 16


@pytest.mark.parametrize(
    ("coverage", "total", "chunk", "slots"),
    [
        (Full(), 33, 8, 9),
        (Full(), 32, 8, 8),
        (Window(9), 400, 8, 2 + 3),
        (Window(9), 400, 1, 2 + 1),
        (Window(9), 12, 8, 3),
        (Window(9), 400, 400, 2 + 101 - 3),
        (Checkpoint(), 400, 8, 1),
    ],
)
def test_the_slots_that_a_request_holds_at_most(coverage, total, chunk, slots):
    assert most_slots(coverage, total, chunk, PAGE) == slots


@pytest.mark.parametrize("model", sorted(KINDS))
@pytest.mark.parametrize("chunk", [1, PAGE + 1, 100])
def test_the_longest_request_that_is_said_to_fit_fits(model, chunk):
    world = World(KINDS[model], device_pages=ROOM)
    longest = 0
    for total in range(1, 3 * ROOM * PAGE):
        try:
            world.cache.require_fit(total, chunk)
            longest = total
        except CapacityError:
            break
    assert grown(world, longest, chunk) == longest


@pytest.mark.parametrize("model", ["window", "window and state", "state and window"])
@pytest.mark.parametrize("chunk", [2 * PAGE - 1, 3 * PAGE - 1])
def test_windows_need_as_many_slots_as_is_said_and_no_fewer(model, chunk):
    total = 40 * PAGE
    need = max(most_slots(pool.coverage, total, chunk, PAGE) for pool in KINDS[model].pools)
    assert grown(World(KINDS[model], device_pages=need), total, chunk) == total
    small = World(KINDS[model], device_pages=need - 1)
    with pytest.raises(CapacityError, match=f"need {need} slots of pool 'swa', which has {need - 1}"):
        small.cache.require_fit(total, chunk)
    assert grown(small, total, chunk) < total


def grown(world: World, total: int, chunk: int) -> int:
    """How many tokens of a request get slots, `chunk` at a time, each inserted before the next."""
    text = tokens(*range(total))
    match = world.cache.match_prefix(tokens(9000), world.namespace)
    for done in range(0, total, chunk):
        world.texts.pop(match, None)
        stop = min(total, done + chunk)
        if world.cache.allocate(match, stop - match.length_tokens) is None:
            break
        world.cache.insert(match, text[: 4 * stop])
        world.settle()
    reached = match.length_tokens
    world.cache.release(match)
    world.idle()
    return reached


def test_what_can_never_fit_is_named_pool_by_pool():
    world = World(THREE_POOLS, device_pages=ROOM)
    world.cache.require_fit(ROOM * PAGE)
    message = (
        r"65 tokens, computed 65 at a time, need 17 slots of pool 'kv', which has 16 and 17 .* 'swa', which has 16"
    )
    with pytest.raises(CapacityError, match=message):
        world.cache.require_fit(ROOM * PAGE + 1)
    with pytest.raises(CapacityError) as caught:
        world.cache.require_fit(ROOM * PAGE + 1, PAGE)
    assert "'kv'" in str(caught.value) and "'swa'" not in str(caught.value)


def test_windows_alone_do_not_limit_how_long_a_request_is_but_how_much_it_computes_at_once():
    world = World(WINDOW, device_pages=ROOM)
    world.cache.require_fit(1 << 20, 13 * PAGE)
    with pytest.raises(CapacityError, match="'swa', which has 16"):
        world.cache.require_fit(1 << 20, 14 * PAGE)


def test_room_is_what_is_free_or_may_go():
    world = World(ONE_POOL, device_pages=ROOM)
    assert world.cache.room() == {"kv": ROOM}
    match = world.prefill(PROMPT)
    assert world.cache.room() == {"kv": ROOM - 5}
    world.cache.release(match)
    world.settle()
    assert world.cache.room() == {"kv": ROOM}
    assert world.cache.stats().pools[0].free < ROOM, "cached pages count: they may go"


@pytest.mark.parametrize("model", sorted(KINDS))
@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_room_after_a_return_is_known_before_it(model, emptied, shared):
    world = World(KINDS[model], device_pages=24)
    match = running(world)
    other = world.prefill(PROMPT + tokens(77)) if shared else None
    retracted = away(world, match)
    world.settle()
    if emptied:
        empty_device(world)
    expected = world.cache.room_after(retracted)
    world.cache.audit()
    assert restored(world, retracted) == match.length_tokens
    assert world.cache.room() == expected
    for one in (match, other):
        if one is not None:
            world.cache.release(one)


def test_a_return_for_which_there_is_no_room_says_how_much_lacks():
    world = World(ONE_POOL, device_pages=8)
    retracted = away(world, running(world))
    world.settle()
    other = world.prefill(OTHER)
    assert world.cache.room() == {"kv": 3}
    assert world.cache.room_after(retracted) == {"kv": 3 - 6}
    assert world.cache.retraction_restore(retracted) is None
    world.cache.release(other)
    world.settle()
    world.cache.evict(Tier.DEVICE)
    assert world.cache.room_after(retracted) == {"kv": 2}
    world.cache.retraction_discard(retracted)
    world.settle()
    assert world.cache.room() == dict.fromkeys(pools(world), 8)


@pytest.mark.parametrize("spare", [2, 3, 7])
@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 9, 40])
@pytest.mark.parametrize("page", [3, 8])
def test_the_largest_chunk_fits_and_one_token_more_does_not(page, window, lookahead, spare):
    coverage = Window(window)
    slots = coverage.pages(page) + spare
    most = most_chunk({"kv": Full(), "swa": coverage}, {"kv": 1000, "swa": slots}, page, lookahead)
    assert most_slots(coverage, 10_000, most, page, lookahead) == slots
    assert most_slots(coverage, 10_000, most + 1, page, lookahead) == slots + 1


def test_without_windows_any_chunk_fits():
    assert most_chunk({"kv": Full(), "state": Checkpoint()}, {"kv": 9, "state": 2}, PAGE, 0) is None
