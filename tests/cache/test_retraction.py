"""A running request leaves the device whole and goes on as before, at any point of its life, whatever fails."""

import random

import pytest

from hicache.errors import InvariantError
from hicache.testing.streams import StreamExecutor, VirtualEvent
from hicache.transfer import Backup
from hicache.transfer import Load as LoadMessage
from hicache.units import Tier
from tests.cache.retracting import (
    ANSWER,
    OTHER,
    PROMPT,
    Account,
    all_is_given_back,
    away,
    count,
    empty_device,
    free,
    pools,
    restored,
    running,
    take_low_slots,
)
from tests.hand import HandExecutor
from tests.world import KINDS, PAGE, THREE_POOLS, World, tokens


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("model", sorted(KINDS))
def test_every_pool_comes_back_byte_for_byte_in_other_slots(model, policy):
    world = World(KINDS[model], write_policy=policy)
    match = running(world)
    before = Account(world, match)
    hits = dict(world.cache.stats().hit_tokens)
    retracted = away(world, match)
    assert not retracted.settled
    world.settle()
    assert retracted.settled
    assert world.cache.stats().retracted == 1
    empty_device(world)
    assert free(world, Tier.DEVICE) == dict.fromkeys(pools(world), world.device_pages), "nothing of it is left"
    other = take_low_slots(world)
    assert restored(world, retracted) == match.length_tokens
    world.cache.audit()
    before.is_in_other_slots(world, match)
    world.check(match)
    world.cache.release(other)
    assert world.decode(match, ANSWER, checkpoint=True)
    world.check(match)
    stats = world.cache.stats()
    assert dict(stats.hit_tokens) == hits, "its own pages are no hits"
    assert stats.counters["lookups"] == 2
    assert (count(world, "backups"), count(world, "restores"), count(world, "lost")) == (1, 1, 0)
    assert stats.retracted == 0
    world.cache.release(match)
    all_is_given_back(world)


@pytest.mark.parametrize("model", sorted(KINDS))
@pytest.mark.parametrize("seed", range(6))
def test_at_random_points_of_its_life(model, seed):
    dice = random.Random(seed)
    world = World(KINDS[model], write_policy=dice.choice(["write_through", "write_back"]), device_pages=24)
    match = world.prefill(PROMPT)
    length = len(PROMPT) // 4
    while length < len(ANSWER) // 4:
        length += dice.randint(1, PAGE + 1)
        kept = dice.random() < 0.5
        assert world.decode(match, ANSWER[: 4 * length], checkpoint=dice.random() < 0.7, checkpoints=kept)
        if dice.random() < 0.6:
            retracted = away(world, match)
            for _ in range(dice.randrange(4)):
                world.cache.poll()
            if dice.random() < 0.5:
                world.cache.evict(Tier.DEVICE)
            other = take_low_slots(world) if dice.random() < 0.5 else None
            assert restored(world, retracted) == match.length_tokens
            world.check(match)
            if other is not None:
                world.cache.release(other)
    world.cache.release(match)
    all_is_given_back(world)


def test_a_request_that_has_nothing_does_not_leave_and_one_that_only_matched_does():
    world = World(THREE_POOLS)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.cache.retraction_backup(match) is None
    world.cache.release(match)
    world.serve(PROMPT)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    retracted = away(world, match)
    world.settle()
    world.cache.evict(Tier.DEVICE)
    assert restored(world, retracted) == 4 * PAGE
    world.check(match)
    assert world.decode(match, PROMPT)
    world.check(match)
    world.cache.release(match)
    all_is_given_back(world)


@pytest.mark.parametrize("model", sorted(KINDS))
def test_nothing_in_the_tree_at_all(model):
    """Reuse is off: the engine never inserts."""
    world = World(KINDS[model])
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.allocate(match, 4 * PAGE + 1)
    world.compute(match, PROMPT)
    retracted = away(world, match)
    world.settle()
    assert free(world, Tier.DEVICE) == dict.fromkeys(pools(world), world.device_pages)
    other = take_low_slots(world)
    assert restored(world, retracted) == 4 * PAGE + 1
    world.check(match)
    world.cache.release(other)
    world.cache.release(match)
    all_is_given_back(world)


@pytest.mark.parametrize("model", sorted(KINDS))
def test_a_host_that_holds_one_request(model):
    """Whatever else is on the host makes room; a second request finds none."""
    world = World(KINDS[model], host_pages=6, device_pages=24)
    world.serve(OTHER)
    world.settle()
    match = running(world)
    retracted = away(world, match)
    world.settle()
    second = world.prefill(OTHER)
    assert world.decode(second, OTHER + tokens(1, 2, 3), checkpoint=True)
    before = free(world, Tier.HOST), world.cache.stats().pins
    if world.cache.retraction_backup(second) is None:
        assert (free(world, Tier.HOST), world.cache.stats().pins) == before
        assert count(world, "refused") == 1
        world.check(second)
        assert world.decode(second, OTHER + tokens(1, 2, 3, 4), checkpoint=True), "the match is as before"
    world.cache.release(second)
    assert restored(world, retracted) == match.length_tokens
    world.check(match)
    world.cache.release(match)
    all_is_given_back(world)


def test_device_slots_are_free_only_once_the_copy_has_settled():
    world = World(executor=HandExecutor())
    match = running(world)
    world.executor.settle(world.cache.poll)
    held = free(world, Tier.DEVICE)["kv"]
    away(world, match)
    assert free(world, Tier.DEVICE)["kv"] == held
    world.executor.run(Backup)
    assert free(world, Tier.DEVICE)["kv"] == held, "the owner has not been told"
    world.cache.poll()
    assert free(world, Tier.DEVICE)["kv"] == held + 1, "the partial page; those before it are clean, and shared"
    world.cache.release(match)
    world.executor.settle(world.cache.poll)
    world.idle()


def test_copies_wait_for_the_computation_that_writes_the_pages():
    world = World(executor=StreamExecutor(), write_policy="write_back")
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.allocate(match, 4 * PAGE + 1)
    run = match.slots().copy()
    event = VirtualEvent()
    world.cache.insert(match, PROMPT, event)
    retracted = away(world, match)
    world.executor.backups.run()
    world.cache.poll()
    assert not retracted.settled
    world.write("kv", run[:4], PROMPT)
    event.passed = True
    world.executor.backups.run()
    world.cache.poll()
    assert retracted.settled
    world.cache.evict(Tier.DEVICE)
    load = world.cache.retraction_restore(retracted)
    world.executor.loads.run()
    assert load.result() == 4 * PAGE + 1
    world.texts[match] = PROMPT
    world.check(match)
    world.cache.release(match)
    world.cache.poll()
    world.idle()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("first_back", [True, False])
@pytest.mark.parametrize("retract_first", [True, False])
@pytest.mark.parametrize("model", ["one", "three", "everything", "window"])
def test_two_requests_share_pages_and_one_goes_on(model, retract_first, first_back, policy):
    world = World(KINDS[model], write_policy=policy, device_pages=24)
    one = running(world)
    two = world.prefill(PROMPT + tokens(1, 2, 3))
    leaving, staying = (one, two) if retract_first else (two, one)
    copied = world.cache.stats().counters["backup_pages"]
    retracted = away(world, leaving)
    world.check(staying)
    text = world.texts[staying] + tokens(*range(700, 700 + 2 * PAGE))
    assert world.decode(staying, text, checkpoint=True)
    world.settle()
    if policy == "write_back":
        assert world.cache.stats().counters["backup_pages"] > copied, "shared pages are copied by the tree, once"
    world.cache.evict(Tier.DEVICE)
    world.check(staying)
    if not first_back:
        world.cache.release(staying)
        world.cache.evict(Tier.DEVICE)
    assert restored(world, retracted) == leaving.length_tokens
    world.check(leaving)
    for match in [leaving, staying] if first_back else [leaving]:
        world.cache.release(match)
    all_is_given_back(world)


def test_host_pressure_does_not_take_what_a_request_that_is_away_shares():
    world = World(host_pages=12, device_pages=24)
    match = running(world)
    retracted = away(world, match)
    world.settle()
    world.cache.evict(Tier.DEVICE)
    world.cache.evict(Tier.HOST)
    for number in range(4):
        world.serve(tokens(*range(2000 + 100 * number, 2000 + 100 * number + 4 * PAGE + 1)))
        world.settle()
    world.cache.evict(Tier.DEVICE)
    world.cache.evict(Tier.HOST)
    assert restored(world, retracted) == match.length_tokens
    world.check(match)
    world.cache.release(match)
    all_is_given_back(world)


def every_pool() -> list[tuple[str, str]]:
    return [(name, pool.name) for name in sorted(KINDS) for pool in KINDS[name].pools]


@pytest.mark.parametrize(("model", "pool"), every_pool())
def test_a_copy_that_fails_in_any_pool_makes_the_retraction_void(model, pool):
    world = World(KINDS[model], executor=HandExecutor())
    match = running(world)
    world.executor.settle(world.cache.poll)
    retracted = away(world, match)
    world.executor.run(Backup, bad={pool: [0]})
    world.cache.poll()
    world.cache.audit()
    assert retracted.lost
    assert retracted.settled
    assert count(world, "lost") == 1
    load = world.cache.retraction_restore(retracted)
    assert load.done
    assert load.result() == 0
    world.cache.retraction_discard(retracted)
    world.executor.settle(world.cache.poll)
    world.idle()


@pytest.mark.parametrize(("model", "pool"), every_pool())
def test_a_load_that_fails_in_any_pool_loses_the_request(model, pool):
    world = World(KINDS[model], executor=HandExecutor())
    match = running(world)
    retracted = away(world, match)
    world.executor.settle(world.cache.poll)
    load = world.cache.retraction_restore(retracted)
    world.executor.run(LoadMessage, bad={pool: [0]})
    assert load.result() == 0
    assert count(world, "lost") == 1
    world.cache.audit()
    with pytest.raises(InvariantError, match="came short"):
        world.cache.insert(match, ANSWER[: 4 * match.length_tokens])
    world.cache.release(match)
    world.executor.settle(world.cache.poll)
    world.idle()


@pytest.mark.parametrize("bad", [0, 3])
def test_a_shared_page_that_could_not_be_copied_makes_it_void(bad):
    world = World(executor=HandExecutor(), write_policy="write_back")
    match = running(world)
    retracted = away(world, match)
    world.executor.run(Backup, bad={"kv": [bad]}, count=1)
    world.executor.run(Backup)
    world.cache.poll()
    world.cache.audit()
    assert retracted.lost
    world.cache.retraction_discard(retracted)
    world.executor.settle(world.cache.poll)
    all_is_given_back(world)


def test_a_load_that_takes_too_long_is_void_and_its_slots_stay_in_flight():
    world = World(executor=HandExecutor())
    match = running(world)
    retracted = away(world, match)
    world.executor.settle(world.cache.poll)
    load = world.cache.retraction_restore(retracted)
    load.wait(0)
    assert load.result() == 0
    world.cache.audit()
    world.cache.release(match)
    world.cache.audit()
    before = free(world, Tier.DEVICE)
    world.executor.settle(world.cache.poll)
    assert free(world, Tier.DEVICE)["kv"] > before["kv"]
    world.idle()


def test_layers_may_run_as_they_arrive():
    world = World(executor=HandExecutor(), timeout_s=5.0)
    match = running(world)
    retracted = away(world, match)
    world.executor.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    load = world.cache.retraction_restore(retracted)
    assert not load.done
    assert match.loading
    assert len(match.slots()) == match.page_count
    assert world.allocate(match, PAGE), "slots ahead of what is still coming"
    world.cache.audit()
    world.executor.run(LoadMessage)
    load.wait(0)
    assert load.done
    assert load.result() == match.length_tokens - PAGE
    world.check(match)
    world.cache.release(match)
    world.executor.settle(world.cache.poll)
    world.idle()


def test_no_room_on_the_device_takes_nothing():
    world = World()
    match = running(world)
    retracted = away(world, match)
    world.settle()
    big = world.cache.match_prefix(OTHER, world.namespace)
    assert world.allocate(big, (world.device_pages - 2) * PAGE)
    before = free(world, Tier.DEVICE), world.cache.stats().pins
    assert world.cache.retraction_restore(retracted) is None
    assert (free(world, Tier.DEVICE), world.cache.stats().pins) == before
    world.cache.audit()
    world.cache.release(big)
    assert restored(world, retracted) == match.length_tokens
    world.check(match)
    world.cache.release(match)
    all_is_given_back(world)


def test_a_match_that_is_away_is_of_no_use():
    world = World()
    match = running(world)
    retracted = away(world, match)
    for use in (
        lambda: world.cache.allocate(match, 1),
        lambda: world.cache.insert(match, PROMPT),
        lambda: world.cache.load_back(match),
        lambda: world.cache.drop_checkpoint(match, 1),
        lambda: world.cache.retraction_backup(match),
        lambda: match.slots(),
    ):
        with pytest.raises(InvariantError, match="was retracted"):
            use()
    assert restored(world, retracted)
    with pytest.raises(InvariantError, match="restored already"):
        world.cache.retraction_restore(retracted)
    world.cache.retraction_discard(retracted)
    with pytest.raises(InvariantError, match="was released"):
        world.cache.retraction_restore(retracted)
    all_is_given_back(world)


def test_a_load_must_have_ended_before_a_request_can_leave():
    world = World(executor=HandExecutor())
    world.serve(PROMPT)
    world.executor.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    world.cache.load_back(match)
    with pytest.raises(InvariantError, match="has not settled"):
        world.cache.retraction_backup(match)
    world.cache.release(match)
    world.executor.settle(world.cache.poll)
    world.idle()
