"""A request that the host has no room for waits in storage, where no other can find it; if that fails it is lost."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hicache.cache import Match, Retracted
from hicache.storage import StorageKey
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import Fault, FaultyBackend, Operation
from hicache.testing.streams import VirtualEvent
from hicache.transfer import Backup, Fetch, Load, Store
from hicache.units import Tier
from tests.cache.retracting import (
    ANSWER,
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
from tests.world import KINDS, PAGE, World


class Book(MemoryBackend):
    """A store that remembers every key that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[StorageKey] = []

    def write(self, keys, values):
        self.written += keys
        return super().write(keys, values)

    def private(self, world: World) -> list[StorageKey]:
        """Keys of no namespace that anybody has."""
        return [key for key in self.written if key.namespace != world.namespace.fingerprint]


@contextmanager
def host_full(world: World, left: int) -> Iterator[None]:
    """All host slots but `left` per pool are in somebody else's hands, or pinned."""
    state = world.cache.controller.state
    demand = {pool: max(0, state.room(pool, Tier.HOST) - left) for pool in pools(world)}
    reservation = state.group.reserve(demand, Tier.HOST)
    assert reservation is not None
    yield
    reservation.cancel()


def spilled(world: World, match: Match, left: int = 1) -> Retracted:
    """It leaves while the host has `left` slots per pool, and has left."""
    with host_full(world, left):
        retracted = world.cache.retraction_backup(match)
        assert retracted is not None
        world.settle()
    assert retracted.settled
    world.cache.audit()
    return retracted


def world_of(model: str, policy: str = "write_back", **settings) -> tuple[World, Book]:
    store = Book()
    return World(KINDS[model], write_policy=policy, backend=settings.pop("backend", store), **settings), store


@pytest.mark.parametrize(
    ("model", "left"), [(model, 1) for model in sorted(KINDS)] + [("latent", 2), ("everything", 2), ("window", 2)]
)
def test_every_pool_comes_back_from_storage(model, left):
    world, store = world_of(model)
    match = running(world)
    before = Account(world, match)
    retracted = spilled(world, match, left)
    assert count(world, "spilled") == 1
    assert store.private(world)
    empty_device(world)
    assert free(world, Tier.DEVICE) == dict.fromkeys(pools(world), world.device_pages), "nothing of it is left"
    world.cache.evict(Tier.HOST)
    other = take_low_slots(world)
    with host_full(world, 1):
        for _ in range(100):
            load = world.cache.retraction_restore(retracted)
            if load is not None:
                break
            world.cache.poll()
        world.settle()
        assert load.result() == match.length_tokens
    world.cache.audit()
    before.is_in_other_slots(world, match)
    world.check(match)
    world.cache.release(other)
    assert not store.contains(store.private(world)).any(), "it is deleted once it is back"
    assert world.decode(match, ANSWER, checkpoint=True)
    world.check(match)
    assert (count(world, "restores"), count(world, "lost")) == (1, 0)
    world.cache.release(match)
    all_is_given_back(world)


def test_what_the_host_has_of_it_is_not_stored_again():
    world, store = world_of("derived", "write_through", host_pages=8)
    match = running(world)
    assert world.allocate(match, 6 * PAGE)
    world.settle()
    own = len(match.owned()["kv"])
    assert own == 7
    away(world, match)
    world.settle()
    assert len([key for key in store.private(world) if key.pool == "kv"]) == own
    assert len([key for key in store.private(world) if key.pool == "indexer"]) == own
    world.cache.evict(Tier.HOST)
    hosts = {pool.pool: pool.cached for pool in world.cache.stats().pools if pool.tier is Tier.HOST}
    assert hosts == {"kv": 5}, "what it shares stays on the host"
    world.cache.release(match)
    all_is_given_back(world)


@pytest.mark.parametrize("model", sorted(KINDS))
def test_pages_behind_those_that_the_host_has_may_leave_the_tree(model):
    world, _ = world_of(model)
    world.serve(PROMPT[: 4 * (2 * PAGE + 1)])
    empty_device(world)
    match = running(world)
    state = world.cache.controller.state
    taken = state.group.reserve({pool: state.available(pool, Tier.HOST) - 1 for pool in pools(world)}, Tier.HOST)
    retracted = world.cache.retraction_backup(match)
    assert retracted is not None
    world.settle()
    taken.cancel()
    world.cache.evict(Tier.DEVICE)
    state.free_eviction(state.tree.flush())
    world.serve(PROMPT[:4] + PROMPT[: 4 * PAGE])
    empty_device(world)
    assert restored(world, retracted) == match.length_tokens
    world.check(match)
    assert world.decode(match, ANSWER, checkpoint=True)
    world.check(match)
    world.cache.release(match)
    all_is_given_back(world)


def test_two_private_objects_have_no_key_in_common():
    world, store = world_of("everything")
    keys = []
    for _ in range(2):
        store.written.clear()
        match = running(world)
        spilled(world, match)
        keys.append({(key.namespace, key.page) for key in store.private(world)})
        assert all(key.private for key in store.private(world)), "a store may drop them with this process"
        assert all(key.private == (key in store.private(world)) for key in store.written)
        world.cache.release(match)
        world.settle()
    assert keys[0]
    assert not keys[0] & keys[1]
    assert not {name for name, _ in keys[0]} & {name for name, _ in keys[1]}


def test_without_storage_it_is_refused_and_goes_on():
    world = World()
    match = running(world)
    world.settle()
    with host_full(world, 0):
        before = free(world, Tier.HOST), free(world, Tier.DEVICE), world.cache.stats().pins
        assert world.cache.retraction_backup(match) is None
        assert (free(world, Tier.HOST), free(world, Tier.DEVICE), world.cache.stats().pins) == before
    assert count(world, "refused") == 1
    world.check(match)
    assert world.decode(match, ANSWER)
    world.cache.release(match)
    all_is_given_back(world)


@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.READ])
@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.FLIP, Fault.RAISE, Fault.MISS])
def test_a_store_that_fails_loses_it(operation, fault):
    faulty = FaultyBackend(MemoryBackend(), lambda asked, key: None)
    world, _ = world_of("derived", backend=faulty)
    match = running(world)

    def choose(asked: Operation, key: StorageKey) -> Fault | None:
        private = key.namespace != world.namespace.fingerprint
        return fault if asked is operation and private and key.pool == "indexer" else None

    faulty.choose = choose
    retracted = spilled(world, match)
    assert restored(world, retracted) == 0
    assert retracted.lost
    assert count(world, "lost") == 1
    world.cache.retraction_discard(retracted)
    faulty.choose = lambda asked, key: None
    all_is_given_back(world)


@pytest.mark.parametrize("kind", [Backup, Store, Fetch, Load])
@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("pool", [pool.name for pool in KINDS["everything"].pools])
def test_a_copy_that_fails_in_any_pool_and_batch_loses_it(kind, batch, pool):
    hand = HandExecutor()
    world, _ = world_of("everything", executor=hand, device_pages=24, batch_pages=1)
    match = running(world)
    lone = {name for name, run in match.widened(_shared(world, match), 0).all().items() if len(run[run >= 0]) < 2}
    if batch and pool in lone:
        pytest.skip("it is in the first batch, whole")
    hand.settle(world.cache.poll)
    with host_full(world, 1):
        retracted = world.cache.retraction_backup(match)
        seen = 0
        for _ in range(80):
            for message in hand.of():
                bad = None
                if isinstance(message, kind):
                    bad = {pool: [0]} if seen == batch else None
                    seen += 1
                hand.run(type(message), bad=bad, count=1)
            world.cache.poll()
            world.cache.retraction_restore(retracted) if not retracted.lost else None
    assert retracted.lost
    assert count(world, "lost") == 1
    world.cache.audit()
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()


def _shared(world: World, match: Match):
    return world.cache.controller.retractions.shared(match.span, match.shared_starts())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("model", ["everything", "state", "window"])
@pytest.mark.parametrize("steps", range(14))
def test_an_abort_at_any_step_gives_everything_back(model, steps, late):
    hand = HandExecutor()
    world, store = world_of(model, executor=hand, device_pages=24, batch_pages=1)
    match = running(world)
    event = VirtualEvent() if late else None
    with host_full(world, 1):
        retracted = world.cache.retraction_backup(match)
        for step in range(steps):
            hand.run(count=1)
            world.cache.poll()
            if step % 2 and retracted.settled and not retracted.match.returning and retracted.match.away:
                world.cache.retraction_restore(retracted)
        world.cache.retraction_discard(retracted, event)
        hand.settle(world.cache.poll)
    world.cache.audit()
    if event is not None:
        event.passed = True
    hand.settle(world.cache.poll)
    all_is_given_back(world)
    assert not store.contains(store.private(world)).any()


def test_a_store_that_is_detached_takes_what_lies_there_along():
    world, _ = world_of("three")
    match = running(world)
    retracted = spilled(world, match)
    world.cache.detach_storage_backend()
    assert restored(world, retracted) == 0
    assert count(world, "lost") == 1
    world.cache.retraction_discard(retracted)
    all_is_given_back(world)


@pytest.mark.parametrize("steps", range(6))
def test_a_cache_closes_while_a_request_goes_to_storage(steps):
    hand = HandExecutor()
    world, _ = world_of("three", executor=hand)
    match = running(world)
    with host_full(world, 1):
        world.cache.retraction_backup(match)
        for _ in range(steps):
            hand.run(count=1)
            world.cache.poll()
        world.cache.close()
        return


def test_no_slot_to_copy_through_and_nothing_that_could_free_one_loses_it():
    world, _ = world_of("three")
    match = running(world)
    retracted = spilled(world, match)
    with host_full(world, 0):
        assert world.cache.retraction_restore(retracted).result() == 0
    assert count(world, "lost") == 1
    world.cache.retraction_discard(retracted)
    all_is_given_back(world)


def test_what_never_settles_is_given_up_once_it_was_waited_for():
    hand = HandExecutor()
    world, _ = world_of("one", executor=hand, timeout_s=5.0)
    match = running(world)
    retracted = away(world, match)
    assert world.cache.retraction_restore(retracted) is None
    world.clock.now_s += 4.0
    assert world.cache.retraction_restore(retracted) is None
    world.clock.now_s += 2.0
    assert world.cache.retraction_restore(retracted).result() == 0
    world.cache.audit()
    world.cache.retraction_discard(retracted)
    world.cache.audit()
    hand.settle(world.cache.poll)
    world.idle()
