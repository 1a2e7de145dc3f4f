"""S30: ranks hold and find other pages; a prefix is what all of them have, and stays on all while one loads it."""

from collections.abc import Callable

import pytest

from hicache.builder import with_replicated
from hicache.controller import DistributedAgree, Place
from hicache.keys import page_keys
from hicache.storage import StorageKey
from hicache.testing.faults import Fault, FaultyBackend, MeteredBackend, Operation
from hicache.testing.ranks import VirtualRanks
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.units import Tier
from tests.controller.driver import Shelf
from tests.world import KINDS, ONE_POOL, PAGE, World, tokens

PROMPT = tokens(*range(5 * PAGE + 1))
RANKS = 3


def worlds(
    group: VirtualRanks, shelf: Callable[[int], object], *, model=ONE_POOL, behind: int = 0, **options
) -> Callable[[int], World]:
    """A world per rank, whose bytes and luck are its own."""

    def make(rank: int) -> World:
        place = Place(rank, group.ranks)
        return World(
            model=model,
            executor=SimulatedExecutor(rank, FaultRates(start=0.3 + 0.2 * rank)),
            backend=shelf(rank),
            agree=DistributedAgree(group.channels[rank], behind=behind, place=place),
            place=f"{rank}",
            timeout_s=1000.0,
            **options,
        )

    return make


def fill(world: World, prompt: bytes = PROMPT) -> None:
    """Compute a prompt, let it get to storage, and forget it."""
    world.serve(prompt)
    drain(world)
    for tier in (Tier.DEVICE, Tier.HOST):
        world.cache.evict(tier)
        drain(world)
    assert world.cached(prompt) == (0, 0)


def stored_key(world: World, prompt: bytes, page: int) -> StorageKey:
    """What this rank's part of a page of the anchor is called in storage."""
    state, owner = world.cache.controller.state, world.namespace.fingerprint
    return state.storage_keys(owner, state.pools[0], None, page_keys(owner, prompt, PAGE))[page]


def drain(world: World) -> None:
    while world.cache.in_flight:
        world.cache.poll()


def fetch(world: World, prompt: bytes = PROMPT) -> int:
    """Tokens that came from storage."""
    ticket = world.cache.prefetch(prompt, world.namespace, 1000.0)
    while not ticket.done:
        world.cache.poll()
    match = world.cache.match_prefix(prompt, world.namespace, ticket)
    world.finish_load(match)
    world.check(match)
    tokens = match.cached_tokens["storage"]
    world.cache.release(match)
    drain(world)
    return tokens


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("model", ["one", "derived", "chunked", "latent"])
def test_a_shard_that_is_gone_on_one_rank_ends_the_hit_on_all(model: str, behind: int):
    """Page 3 (of 1 to 5) of one rank is deleted: every rank gets pages 1 and 2, and later all of them again."""
    group, shelf = VirtualRanks(RANKS), Shelf()
    make = worlds(group, lambda rank: shelf, model=KINDS[model], behind=behind, device_pages=12, host_pages=24)

    def one(rank: int) -> tuple[int, int, bytes]:
        world = make(rank)
        fill(world)
        if rank == 1:
            assert shelf.delete([stored_key(world, PROMPT, 2)]).all()
        first = fetch(world)
        fill(world)
        again = fetch(world)
        digest = world.cache.digest()
        world.cache.close()
        return first, again, digest

    endings = group.run(one)
    assert len(set(endings)) == 1
    assert endings[0][:2] == (2 * PAGE, 5 * PAGE)


def test_ranks_that_lose_other_pages_have_what_none_has_lost():
    """Each rank's store says no to another page; the shortest prefix is everybody's."""
    group = VirtualRanks(RANKS)
    shelves = [Shelf() for _ in range(RANKS)]
    make = worlds(group, lambda rank: shelves[rank])

    def one(rank: int) -> tuple[int, bytes]:
        world = make(rank)
        fill(world)
        shelves[rank].delete([stored_key(world, PROMPT, 4 - rank)])
        tokens = fetch(world)
        digest = world.cache.digest()
        world.cache.close()
        return tokens, digest

    endings = group.run(one)
    assert len(set(endings)) == 1
    assert endings[0][0] == (4 - RANKS + 1) * PAGE


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.FLIP, Fault.STALE, Fault.MISS])
def test_a_page_that_one_rank_can_not_read_ends_the_hit_on_all(fault: Fault):
    """It is there for all when they ask, and bad on one when it is read."""
    group, shelf = VirtualRanks(RANKS), Shelf()
    faulty = FaultyBackend(shelf, lambda operation, key: None)
    make = worlds(group, lambda rank: faulty if rank == 2 else shelf)

    def one(rank: int) -> tuple[int, bytes]:
        world = make(rank)
        fill(world)
        if rank == 2:
            bad = stored_key(world, PROMPT, 3).page
            faulty.choose = lambda operation, key: fault if operation is Operation.READ and key.page == bad else None
        tokens = fetch(world)
        digest = world.cache.digest()
        world.cache.close()
        return tokens, digest

    endings = group.run(one)
    assert len(set(endings)) == 1
    assert endings[0][0] == 3 * PAGE


def test_what_one_loads_stays_on_all_from_the_lookup_to_the_load():
    """Between lookup and load, every rank is asked for all the memory that it can give."""
    group = VirtualRanks(RANKS)
    make = worlds(group, lambda rank: Shelf(), host_pages=6, device_pages=6)

    def one(rank: int) -> tuple[int, bytes]:
        world = make(rank)
        world.serve(PROMPT)
        drain(world)
        world.cache.evict(Tier.DEVICE)
        match = world.cache.match_prefix(PROMPT, world.namespace)
        for number in range(3):
            world.cache.evict(Tier.HOST)
            world.cache.poll()
            world.serve(tokens(*range(100 * number + 50, 100 * number + 50 + 2 * PAGE)))
        assert match.host_tokens == 5 * PAGE
        world.finish_load(match)
        world.check(match)
        length, digest = match.shared_tokens, world.cache.digest()
        world.cache.release(match)
        world.cache.close()
        return length, digest

    endings = group.run(one)
    assert len(set(endings)) == 1
    assert endings[0][0] == 5 * PAGE


def test_pages_that_all_ranks_hold_alike_are_written_by_one_and_read_by_all():
    model = with_replicated(KINDS["latent"], "latent")
    group, shelf = VirtualRanks(RANKS), Shelf()
    stores = [MeteredBackend(shelf) for _ in range(RANKS)]
    make = worlds(group, lambda rank: stores[rank], model=model)

    def one(rank: int) -> tuple[int, int, int, bytes]:
        world = make(rank)
        world.alike = ("latent", "latent.draft0")
        fill(world)
        asked = stores[rank].meters[Operation.CONTAINS].pages
        assert asked == stores[rank].meters[Operation.WRITE].good_pages == (10 if rank == 0 else 5)
        tokens = fetch(world)
        counters, digest = world.cache.stats().counters, world.cache.digest()
        world.cache.close()
        return tokens, counters["store_pages"], counters["store_failed_pages"], digest

    endings = group.run(one)
    assert len(set(endings)) == 1
    assert endings[0][:3] == (5 * PAGE, 5, 0)
    assert [store.meters[Operation.READ].good_pages for store in stores] == [10] * RANKS
