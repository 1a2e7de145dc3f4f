"""On several ranks a load, an event and a late layer count once every rank has told of them, and never before."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from hicache.cache import Load, Match
from hicache.controller import DistributedAgree
from hicache.errors import ConfigError, InvariantError
from hicache.testing.ranks import VirtualRanks
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.testing.streams import VirtualEvent
from hicache.transfer import Completion
from hicache.units import Tier
from tests.world import LAYERS, PAGE, World, tokens

PROMPT = tokens(*range(3 * PAGE + 1))


class Held(SimulatedExecutor):
    """Transfers run when they are let."""

    def __init__(self) -> None:
        super().__init__(0, FaultRates(start=1.0))
        self.held = False
        self.lost_until = 0
        """Completions up to this id don't come."""

    def poll(self) -> list[Completion]:
        return [] if self.held else [one for one in super().poll() if one.id > self.lost_until]


def on_ranks(
    work: Callable[[World, Held, int], object], *, timeout_s: float = 1000.0, lost: bool = False
) -> list[object]:
    """What `work` came to on each rank, after which the trees are equal and nothing is left, but for what is lost."""
    group = VirtualRanks(2)

    def one(rank: int) -> tuple[object, bytes]:
        executor = Held()
        world = World(agree=DistributedAgree(group.channels[rank]), executor=executor, timeout_s=timeout_s)
        result = work(world, executor, rank)
        while world.cache.in_flight > lost:
            world.cache.poll()
        if not lost:
            world.idle()
        digest = world.cache.digest()
        world.cache.close()
        return result, digest

    endings = group.run(one)
    assert len({digest for _, digest in endings}) == 1
    assert len(set(group.calls)) == 1
    return [result for result, _ in endings]


def begin_load(world: World) -> tuple[Match, Load]:
    """A prompt that is on the host is on its way to the device."""
    world.serve(PROMPT)
    world.settle()
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    assert load is not None
    return match, load


def test_a_load_is_done_in_the_step_in_which_the_last_rank_has_told():
    def work(world: World, executor: Held, rank: int) -> list[object]:
        match, load = begin_load(world)
        seen = []
        for step in range(4):
            executor.held = rank == 1 and step < 2
            world.cache.poll()
            seen.append(load.done)
        tokens = load.result()
        world.check(match)
        world.cache.release(match)
        return [*seen, tokens]

    assert on_ranks(work) == [[False, False, True, True, 3 * PAGE]] * 2


def test_a_result_that_is_not_known_everywhere_is_refused_without_a_call():
    def work(world: World, executor: Held, rank: int) -> None:
        match, load = begin_load(world)
        executor.held = rank == 0
        world.cache.poll()
        with pytest.raises(InvariantError, match="poll\\(\\) until done"):
            load.result()
        executor.held = False
        world.cache.poll()
        assert load.result() == 3 * PAGE
        world.cache.release(match)

    on_ranks(work)


def test_a_rank_that_went_on_without_a_layer_makes_the_step_void_on_all():
    """Its bytes come after all; they stay, but what was computed without them is nowhere of use."""

    def work(world: World, executor: Held, rank: int) -> int:
        match, load = begin_load(world)
        if rank == 1:
            for layer in range(LAYERS):
                load.wait(layer)
        world.cache.poll()
        assert load.done
        result = load.result()
        again = world.cache.load_back(match)
        assert again is not None
        assert again.done
        assert again.result() == 3 * PAGE
        world.check(match)
        world.cache.release(match)
        return result

    assert on_ranks(work, timeout_s=1e-9) == [0, 0]


def test_a_load_that_one_rank_never_ends_is_given_up_by_all_in_one_step():
    def work(world: World, executor: Held, rank: int) -> list[object]:
        match, load = begin_load(world)
        executor.held = rank == 1
        seen = []
        for _ in range(4):
            world.clock.now_s += 4.0
            world.cache.poll()
            seen.append(load.done)
        result = load.result()
        world.cache.release(match)
        executor.held = False
        return [*seen, result]

    assert on_ranks(work, timeout_s=10.0) == [[False, False, True, True, 0]] * 2


def test_a_load_that_was_given_up_is_void_though_another_has_brought_its_pages():
    """The first to give up loads again; who waited for the lost load ran in slots that nothing came to."""

    def work(world: World, executor: Held, rank: int) -> list[int]:
        first, load = begin_load(world)
        executor.lost_until = world.cache.controller.state.dispatcher.newest_id * rank
        world.clock.now_s += 6.0
        world.cache.poll()
        second = world.cache.match_prefix(PROMPT, world.namespace)
        joined = world.cache.load_back(second)
        assert joined is not None
        world.clock.now_s += 6.0
        world.cache.poll()
        assert (load.done, joined.done) == (True, False)
        results = [load.result()]
        again = world.cache.load_back(first)
        assert again is not None
        world.clock.now_s += 6.0
        world.cache.poll()
        assert (again.done, joined.done) == (True, True)
        results += [again.result(), joined.result(), second.shared_tokens]
        world.check(first)
        world.check(second)
        for match in (first, second):
            world.cache.release(match)
        return results

    assert on_ranks(work, timeout_s=10.0, lost=True) == [[0, 3 * PAGE, 0, 3 * PAGE]] * 2


def test_what_computation_needs_goes_back_once_it_has_passed_on_every_rank():
    def work(world: World, executor: Held, rank: int) -> list[int]:
        event = VirtualEvent()
        event.passed = rank == 0
        world.cache.poll()
        match = world.cache.match_prefix(PROMPT, world.namespace)
        assert world.allocate(match, 2 * PAGE)
        world.compute(match, PROMPT[: 8 * PAGE])
        world.cache.release(match, after=event)
        free = []
        for step in range(4):
            event.passed = event.passed or step == 2
            world.cache.poll()
            free.append(next(one.free for one in world.cache.stats().pools if one.tier is Tier.DEVICE))
        return free

    assert on_ranks(work) == [[14, 14, 16, 16]] * 2


def test_a_retracted_request_comes_back_on_all_ranks_or_on_none():
    def work(world: World, executor: Held, rank: int) -> list[object]:
        world.cache.poll()
        match = world.prefill(PROMPT)
        retracted = world.cache.retraction_backup(match)
        assert retracted is not None
        seen: list[object] = []
        for step in range(4):
            executor.held = rank == 1 and step < 2
            world.cache.poll()
            seen.append(retracted.settled)
        load = world.cache.retraction_restore(retracted)
        assert load is not None
        executor.held = rank == 0
        world.cache.poll()
        seen.append(load.done)
        executor.held = False
        world.cache.poll()
        seen += [load.done, load.result()]
        world.check(match)
        world.cache.release(match)
        return seen

    assert on_ranks(work) == [[False, False, False, True, False, True, 3 * PAGE + 1]] * 2


def test_a_namespace_that_names_a_shard_of_its_own_is_refused():
    def work(world: World, executor: Held, rank: int) -> None:
        with pytest.raises(ConfigError, match="leave shard out"):
            world.cache.match_prefix(PROMPT, replace(world.namespace, shard=f"{rank}/2"))
        with pytest.raises(ConfigError, match="leave shard out"):
            world.cache.prefetch(PROMPT, replace(world.namespace, shard=f"{rank}/2"))

    on_ranks(work)
