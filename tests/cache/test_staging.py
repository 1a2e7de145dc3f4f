"""A host of a few pages is a buffer between device and storage: what is longer than it goes through it in pieces."""

from typing import Any

import pytest

from hicache.builder import ModelDescription
from hicache.testing.faults import Fault, FaultyBackend
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.transfer import ThreadExecutor
from hicache.units import Tier
from tests.cache.test_prefetch import Shelf, finishes
from tests.hand import HandExecutor
from tests.world import KINDS, PAGE, THREE_POOLS, World, tokens

LONG = tokens(*range(12 * PAGE + 1))


def world_over(shelf: Shelf, model: ModelDescription, host_pages: int, **settings: Any) -> tuple[World, HandExecutor]:
    hand = HandExecutor()
    settings = {"device_pages": 32, **settings}
    return World(model, executor=hand, backend=shelf, host_pages=host_pages, **settings), hand


def audited(world: World, hand: HandExecutor, rounds: int = 60) -> None:
    for _ in range(rounds):
        hand.run()
        world.cache.poll()
        world.cache.audit()


def stores(shelf: Shelf, model: ModelDescription, host_pages: int, *lengths: int, **settings: Any) -> None:
    """A cache computes a prompt, some pages at a time, and ends."""
    world, hand = world_over(shelf, model, host_pages, **settings)
    for pages in lengths:
        world.serve(LONG[: (pages * PAGE + 1) * 4])
        audited(world, hand)
    world.idle()
    world.cache.close()


def prefetches(shelf: Shelf, model: ModelDescription, host_pages: int, **settings: Any) -> tuple[World, int]:
    """Another asks for all of it. Returns how many pages it then has, which it goes on with."""
    world, hand = world_over(shelf, model, host_pages, **settings)
    ticket = world.cache.prefetch(LONG, world.namespace)
    audited(world, hand)
    assert ticket.done
    got = world.cached(LONG)[1] // PAGE
    finishes(world, hand, ticket, LONG)
    return world, got


@pytest.mark.parametrize("host_pages", [1, 2, 3, 5, 11, 12, 13])
@pytest.mark.parametrize("model", ["one", "derived", "latent"])
def test_a_prompt_that_is_longer_than_the_host_goes_to_storage_and_comes_back(model, host_pages):
    shelf = Shelf()
    stores(shelf, KINDS[model], host_pages, 12)
    world, got = prefetches(shelf, KINDS[model], host_pages)
    assert got == 12
    assert world.cache.stats().counters["fetch_refused_pages"] == 0
    world.cache.close()


@pytest.mark.parametrize("host_pages", [4, 7, 11])
def test_windows_come_back_through_a_small_host(host_pages):
    shelf = Shelf()
    stores(shelf, KINDS["window"], host_pages, 12)
    _, got = prefetches(shelf, KINDS["window"], host_pages)
    assert got == 12


def test_recurrent_state_comes_back_as_far_as_a_snapshot_lies_within_the_host():
    shelf = Shelf()
    stores(shelf, THREE_POOLS, 6, 4, 8, 12)
    assert prefetches(shelf, THREE_POOLS, 6)[1] == 12
    assert prefetches(shelf, THREE_POOLS, 3)[1] == 0


def test_the_device_is_the_limit_then_and_nothing_hangs():
    """Pages of the prompt itself are never thrown out for its later ones."""
    shelf = Shelf()
    stores(shelf, KINDS["one"], 2, 12)
    world, hand = world_over(shelf, KINDS["one"], 2, device_pages=8)
    ticket = world.cache.prefetch(LONG, world.namespace)
    audited(world, hand)
    assert ticket.done
    assert world.cached(LONG)[1] >= 8 * PAGE
    world.idle()


def test_pieces_wait_for_room_that_is_being_written_back():
    shelf = Shelf()
    stores(shelf, KINDS["one"], 12, 12)
    world, hand = world_over(shelf, KINDS["one"], 4, device_pages=8, write_policy="write_back")
    world.serve(tokens(*range(700, 700 + 4 * PAGE + 1)))
    hand.settle(world.cache.poll)
    ticket = world.cache.prefetch(LONG[: (8 * PAGE + 1) * 4], world.namespace)
    audited(world, hand)
    assert ticket.done
    assert world.cached(LONG)[1] >= 4 * PAGE
    world.idle()


def test_a_piece_that_storage_does_not_take_ends_the_stream():
    """What was tried once is not tried again and again; the next use of the prompt does."""
    hand = HandExecutor()
    faulty = FaultyBackend(Shelf(), lambda operation, key: Fault.FAIL)
    world = World(executor=hand, backend=faulty, host_pages=2, device_pages=32)
    world.serve(LONG)
    audited(world, hand)
    assert len(hand.waiting) == 0
    backups = world.cache.stats().counters["backup_pages"]
    assert backups <= 12
    faulty.choose = lambda operation, key: None
    world.serve(LONG + tokens(*range(900, 900 + PAGE)))
    audited(world, hand)
    assert world.cache.stats().storage.written_pages == 13
    world.idle()


@pytest.mark.parametrize("seed", range(6))
def test_trouble_on_a_small_host_shrinks_hits_and_leaks_nothing(seed):
    """Lost, failed and partial transfers, while prompts go through a host of three pages and come back."""
    shelf = Shelf()
    rates = FaultRates(start=0.6, fail=0.1, partial=0.1)
    world = World(executor=SimulatedExecutor(seed, rates), backend=shelf, host_pages=3, device_pages=16)
    for turn in range(8):
        prompt = tokens(*range(turn % 3 * 100, turn % 3 * 100 + (6 + turn % 5) * PAGE + 1))
        ticket = world.cache.prefetch(prompt, world.namespace, 50.0)
        for _ in range(40):
            world.cache.poll()
            world.cache.audit()
        world.clock.now_s += 60.0
        world.cache.poll()
        assert ticket.done
        world.serve(prompt, ticket)
        world.cache.evict(Tier.DEVICE if turn % 2 else Tier.HOST)
    world.settle()
    world.idle()
    world.cache.close()


def test_it_works_on_threads():
    shelf = Shelf()
    for _ in range(2):
        world = World(executor=ThreadExecutor(), backend=shelf, host_pages=2, device_pages=32, timeout_s=30.0)
        ticket = world.cache.prefetch(LONG, world.namespace)
        while not ticket.done:
            world.cache.poll()
        hit = world.cached(LONG)[1]
        world.serve(LONG, ticket)
        while world.cache.in_flight:
            world.cache.poll()
        world.idle()
        world.cache.close()
    assert hit == 12 * PAGE
