"""S20: whatever a store does, requests end by recompute within their deadline; it is left alone, and found again."""

import numpy as np
import pytest

from hicache.builder import build_kv_cache
from hicache.config import CacheConfig
from hicache.storage import BreakerOptions, BreakerState, PageStore, StorageKey
from hicache.testing.faults import Fault, FaultyBackend, HeldBackend, Operation
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.transfer import Completion, Fetch, ThreadExecutor
from hicache.units import Tier
from tests.cache.test_prefetch import PROMPT, Shelf
from tests.hand import HandExecutor
from tests.storage.engines import wait_until
from tests.world import ONE_POOL, PAGE, World

DEADLINE_S = 2.0


def world_over(store: PageStore, executor) -> World:
    world = World(executor=executor, timeout_s=30.0, settings={"prefetch_timeout_s": DEADLINE_S})
    world.cache.attach_storage_backend(store)
    return world


def filled() -> Shelf:
    shelf, hand = Shelf(), HandExecutor()
    world = World(executor=hand, backend=shelf)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    world.cache.close()
    return shelf


def one_request(world: World) -> int:
    """Served by its deadline on the cache's clock, however long anything blocks; how many tokens storage gave."""
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    world.clock.now_s += DEADLINE_S
    world.cache.poll()
    assert ticket.done
    match = world.prefill(PROMPT, ticket)
    world.check(match)
    cached = match.cached_tokens["storage"]
    world.cache.release(match)
    return cached


def forget(world: World) -> None:
    world.cache.evict(Tier.DEVICE)
    world.cache.evict(Tier.HOST)


@pytest.mark.parametrize("operation", [Operation.CONTAINS, Operation.READ, Operation.WRITE])
def test_a_call_that_blocks_holds_up_no_request_and_its_answer_may_come_late(operation):
    held = HeldBackend(filled() if operation is not Operation.WRITE else Shelf())
    executor = ThreadExecutor()
    world = world_over(PageStore(held, BreakerOptions(slow_s=0.05, pause_s=0.05)), executor)
    held.hold(operation)
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    if operation is Operation.WRITE:
        world.cache.cancel_prefetch(ticket)
        world.serve(PROMPT)

    def blocked() -> bool:
        world.cache.poll()
        return bool(held.wait_until_held(operation, 0.01))

    wait_until(blocked, "the call")
    world.clock.now_s += DEADLINE_S
    world.cache.poll()
    assert ticket.done
    world.serve(PROMPT)

    def paused() -> bool:
        world.cache.poll()
        return bool(world.cache.health())

    wait_until(paused, "the pause")
    for _ in range(5):
        one_request(world)
        world.cache.audit()
    assert any("paused" in line for line in world.cache.health())
    held.release(operation)

    def recovered() -> bool:
        forget(world)
        world.serve(PROMPT, None)
        one_request(world)
        return not world.cache.health()

    wait_until(recovered, "the recovery")
    while world.cache.in_flight:
        world.cache.poll()
    world.idle()
    world.cache.close()


@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.FAIL])
def test_a_store_that_dies_is_left_alone_and_found_again(fault):
    shelf = filled()

    def choose(operation: Operation, key: StorageKey) -> Fault | None:
        return fault if fault is Fault.RAISE or operation is not Operation.CONTAINS else None

    faulty = FaultyBackend(shelf, choose)
    hand = HandExecutor()
    store = PageStore(faulty, BreakerOptions(failures=3, slow_s=60.0, pause_s=0.01))
    world = world_over(store, hand)
    for _ in range(4):
        ticket = world.cache.prefetch(PROMPT, world.namespace)
        hand.settle(world.cache.poll)
        assert ticket.done, "no deadline is needed for what is answered"
        world.serve(PROMPT)
        hand.settle(world.cache.poll)
        forget(world)
    assert store.stats().reading.opened >= 1
    faulty.choose = lambda operation, key: None

    def found() -> bool:
        ticket = world.cache.prefetch(PROMPT, world.namespace)
        hand.settle(world.cache.poll)
        assert ticket.done
        return bool(world.cached(PROMPT)[1] == 6 * PAGE)

    wait_until(found, "the store's return")
    assert store.stats().reading.state is BreakerState.CLOSED
    hand.settle(world.cache.poll)
    world.idle()


def test_an_answer_that_comes_twice_or_to_nobody_changes_nothing():
    shelf, hand = filled(), HandExecutor()
    world = world_over(PageStore(shelf), hand)
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    hand.run()
    world.cache.poll()
    fetches = hand.of(Fetch)
    hand.run()
    again = [Completion(fetch.id, {"kv": np.zeros(len(fetch.content[0].keys), np.bool_)}) for fetch in fetches]
    world.cache.poll()
    hand._ready += [*again, Completion(10**6)]
    world.cache.poll()
    hand.settle(world.cache.poll)
    assert ticket.done
    assert world.cached(PROMPT) == (0, 6 * PAGE)
    world.idle()


def test_answers_that_never_come_keep_their_pages_and_nobody_else():
    shelf = filled()
    executor = SimulatedExecutor(0, FaultRates(start=1.0, lose=1.0))
    world = world_over(PageStore(shelf), executor)
    for _ in range(3):
        assert one_request(world) == 0
        world.cache.audit()
    world.cache.close()


def test_a_store_that_is_absent_at_the_start_is_said_to_be_and_nothing_else():
    config = CacheConfig(device_size=ONE_POOL.slot_bytes * 8, host_size=ONE_POOL.slot_bytes * 8, page_size=PAGE)
    cache = build_kv_cache(ONE_POOL, config.replace(storage_url="valkey://127.0.0.1:9/0?timeout=1"))
    assert cache.health()
    cache.close()
