"""S19: whatever differs between ranks, each makes as many collective calls and decides as the others, or is named."""

from collections.abc import Callable
from typing import Any

import pytest

from hicache.controller import DistributedAgree
from hicache.controller.frames import HEADER_BYTES, REPORT_BYTES
from hicache.errors import RankError
from hicache.testing.faults import Fault, FaultyBackend, Operation
from hicache.testing.ranks import VirtualRanks
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.units import Tier
from tests.controller.driver import Shelf
from tests.world import PAGE, World, tokens

PROMPT = tokens(*range(4 * PAGE + 1))


def world_of(group: VirtualRanks, rank: int, executor: SimulatedExecutor | None = None, **options: Any) -> World:
    return World(
        agree=DistributedAgree(group.channels[rank]),
        place=str(rank),
        executor=executor if executor is not None else SimulatedExecutor(rank, FaultRates(start=0.4)),
        timeout_s=1000.0,
        **options,
    )


def alike(group: VirtualRanks, make: Callable[[int], World], work: Callable[[World, int], object]) -> object:
    """What `work` came to, on every rank; the trees are equal, and so are the calls."""

    def one(rank: int) -> tuple[object, bytes]:
        world = make(rank)
        result = work(world, rank)
        digest = world.cache.digest()
        world.cache.close()
        return result, digest

    first, *others = group.run(one)
    assert all(other == first for other in others)
    assert len(set(group.calls)) == 1
    return first[0]


def drain(world: World) -> None:
    while world.cache.in_flight:
        world.cache.poll()


def test_a_host_that_is_smaller_on_one_rank_is_full_on_all_at_once():
    group = VirtualRanks(2)

    def work(world: World, rank: int) -> list[int]:
        refused = []
        for number in range(6):
            world.serve(tokens(*range(100 * number, 100 * number + 4 * PAGE)))
            drain(world)
            refused.append(world.cache.stats().counters["backup_refused_pages"])
        return [*refused, sum(one.slots for one in world.cache.stats().pools)]

    sizes = [32, 6]
    result = alike(group, lambda rank: world_of(group, rank, host_pages=sizes[rank], write_policy="write_back"), work)
    assert isinstance(result, list)


def test_memory_that_one_rank_alone_lacks_has_a_name_and_nobody_hangs():
    """A pool that says no on one rank only, as if it were smaller than agreed."""
    group = VirtualRanks(2)

    def one(rank: int) -> str:
        world = world_of(group, rank)
        world.serve(PROMPT)
        drain(world)
        if rank == 1:
            world.cache.controller.mem_pool_host.get_pool("kv").alloc(world.cache.controller.mem_pool_host.available)
        with pytest.raises(RankError) as caught:
            for number in range(1, 100):
                world.serve(tokens(*range(100 * number, 100 * number + 4 * PAGE)))
                drain(world)
        world.cache.close()
        return str(caught.value)

    first, second = group.run(one)
    assert first == second
    assert "ranks [1] moved other pages than rank 0" in first


def test_requests_that_differ_have_a_name():
    group = VirtualRanks(3)

    def one(rank: int) -> str:
        world = world_of(group, rank)
        world.cache.poll()
        world.serve(PROMPT if rank != 1 else tokens(*range(7, 4 * PAGE + 8)))
        with pytest.raises(RankError) as caught:
            world.cache.poll()
        world.cache.close()
        return str(caught.value)

    assert set(group.run(one)) == {"step 1: ranks [1] were given other requests than rank 0"}


def test_a_prefetch_that_one_store_refuses_is_refused_on_all():
    group = VirtualRanks(2)
    shelves = [Shelf(), Shelf()]
    faulty = FaultyBackend(shelves[1], lambda operation, key: None)

    def work(world: World, rank: int) -> int:
        world.serve(PROMPT)
        drain(world)
        for tier in (Tier.DEVICE, Tier.HOST):
            world.cache.evict(tier)
            drain(world)
        if rank == 1:
            faulty.choose = lambda operation, key: Fault.RAISE if operation is Operation.CONTAINS else None
        ticket = world.cache.prefetch(PROMPT, world.namespace)
        while not ticket.done:
            world.cache.poll()
        return world.cached(PROMPT)[1]

    backends = [shelves[0], faulty]
    assert alike(group, lambda rank: world_of(group, rank, backend=backends[rank]), work) == 0


def test_a_rank_with_more_to_say_than_fits_makes_no_further_calls():
    """Every transfer ends at once on one rank; a frame holds two reports."""
    group = VirtualRanks(2, frame_bytes=HEADER_BYTES + 2 * REPORT_BYTES)
    rates = [FaultRates(start=1.0), FaultRates(start=0.2)]

    def work(world: World, rank: int) -> int:
        for number in range(3):
            world.serve(tokens(*range(100 * number, 100 * number + 4 * PAGE)))
        drain(world)
        return world.cache.stats().counters["store_pages"]

    def make(rank: int) -> World:
        return world_of(group, rank, executor=SimulatedExecutor(0, rates[rank]), backend=Shelf(), batch_pages=1)

    assert alike(group, make, work) == 3 * 4


def test_ranks_without_work_poll_all_the_same():
    """Nothing is asked of any rank for a while; then a prompt is found that was there before."""
    group = VirtualRanks(3)

    def work(world: World, rank: int) -> int:
        world.serve(PROMPT)
        for _ in range(20):
            world.cache.poll()
        return world.cached(PROMPT)[0]

    assert alike(group, lambda rank: world_of(group, rank), work) == 4 * PAGE


def test_a_deadline_passes_on_all_ranks_in_one_step_whatever_their_clocks_say():
    group = VirtualRanks(2)

    def work(world: World, rank: int) -> list[bool]:
        world.clock.now_s = 1e6 * (1 - rank)
        world.cache.poll()
        ticket = world.cache.prefetch(PROMPT, world.namespace, 5.0)
        seen = []
        for _ in range(7):
            world.clock.now_s += 1.0 if rank == 0 else 100.0
            world.cache.poll()
            seen.append(ticket.done)
        return seen

    def make(rank: int) -> World:
        return world_of(group, rank, backend=Shelf(), executor=SimulatedExecutor(0, FaultRates(start=0.0)))

    assert alike(group, make, work) == [False] * 4 + [True] * 3
