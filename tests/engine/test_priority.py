"""Who has a higher priority goes first, also before who runs; who was overtaken or retracted is served in the end."""

import numpy as np
import pytest

from hicache.engine.work import CoreOptions
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from tests.engine.bench import Answer, Bench
from tests.engine.tiny import PAGE, prompt


class Steps:
    """A clock that a test moves: a second for each step."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def small_bench(model, clock: Steps, device_pages: int = 200, **options) -> Bench:
    limits = CoreOptions(**{"max_running": 1, "chunk_tokens": 64, **options})
    transfers = SimulatedExecutor(0, FaultRates(start=1.0))
    return Bench(model, device_pages=device_pages, options=limits, transfers=transfers, clock=clock)


def step(bench: Bench, clock: Steps) -> None:
    clock.now_s += 1.0
    bench.core.step()


def order_of_ending(bench: Bench, clock: Steps, answers: dict[str, Answer]) -> list[str]:
    ended: list[str] = []
    while bench.core.has_work:
        step(bench, clock)
        ended += [name for name, answer in answers.items() if answer.reason and name not in ended]
    return ended


def close(bench: Bench) -> None:
    bench.settle()
    bench.idle()
    bench.core.close()


def test_whoever_waits_goes_by_priority_then_by_arrival(model):
    clock = Steps()
    bench = small_bench(model, clock, priority_ageing_s=1e6)
    asked = {"a": 0, "b": 2, "c": 2, "d": -1, "e": 0}
    answers = {name: bench.add(prompt(20, n), 3, priority=priority) for n, (name, priority) in enumerate(asked.items())}
    assert order_of_ending(bench, clock, answers) == ["b", "c", "a", "e", "d"]
    assert bench.core.stats().preemptions == 0
    close(bench)


@pytest.mark.parametrize("retract", [True, False])
def test_the_lowest_priority_that_came_last_gives_way_and_comes_back(model, retract):
    clock = Steps()
    bench = small_bench(model, clock, max_running=3, retract=retract, priority_ageing_s=1e6)
    alone = [bench.ask(prompt(20, n), 20, ignore_eos=True, salt="alone").tokens for n in range(4)]
    names = ("first", "low", "last low", "high")
    asked = zip(names, (0, -1, -1), strict=False)
    answers = {n: bench.add(prompt(20, i), 20, ignore_eos=True, priority=p) for i, (n, p) in enumerate(asked)}
    for _ in range(4):
        step(bench, clock)
    answers["high"] = bench.add(prompt(20, 3), 20, ignore_eos=True, priority=1)
    step(bench, clock)
    step(bench, clock)
    step(bench, clock)
    assert [one.request.priority for one in bench.core.lineup.running] == [1, 0, -1]
    assert bench.core.stats().preemptions == 1
    assert bench.core.stats().retractions == int(retract)
    assert order_of_ending(bench, clock, answers) == ["first", "low", "high", "last low"]
    assert [answers[name].tokens for name in names] == alone
    close(bench)


def test_an_equal_priority_waits(model):
    clock = Steps()
    bench = small_bench(model, clock, priority_ageing_s=1e6)
    answers = {"a": bench.add(prompt(20), 20, ignore_eos=True, priority=3)}
    step(bench, clock)
    answers["b"] = bench.add(prompt(20, 1), 3, priority=3)
    assert order_of_ending(bench, clock, answers) == ["a", "b"]
    assert bench.core.stats().preemptions == 0
    close(bench)


def test_nobody_gives_way_where_that_would_not_help(model):
    clock = Steps()
    bench = small_bench(model, clock, device_pages=24, max_running=3, priority_ageing_s=1e6)
    answers = {
        "large": bench.add(prompt(12 * PAGE), 4 * PAGE, ignore_eos=True, priority=9),
        "small": bench.add(prompt(2 * PAGE, 1), 4 * PAGE, ignore_eos=True),
    }
    for _ in range(3):
        step(bench, clock)
    answers["too large now"] = bench.add(prompt(14 * PAGE, 2), 4, priority=5)
    for _ in range(5):
        step(bench, clock)
    assert bench.core.stats().preemptions == 0
    assert [one.request.priority for one in bench.core.lineup.running] == [9, 0]
    while bench.core.has_work:
        step(bench, clock)
    assert {answer.reason for answer in answers.values()} == {"length"}
    close(bench)


def test_nobody_starts_into_room_that_answers_need_soon(model):
    clock = Steps()
    bench = small_bench(model, clock, device_pages=20, max_running=3)
    first = bench.add(prompt(60), 60, ignore_eos=True)
    second = bench.add(prompt(40, 1), 60, ignore_eos=True)
    while first.reason is None:
        step(bench, clock)
        assert second.tokens == [], "8 and 5 pages fit now, 12 and 9 do not"
    bench.run()
    assert (second.reason, bench.core.stats().preemptions) == ("length", 0)
    close(bench)


def test_memory_is_taken_from_the_lowest_priority(model):
    clock = Steps()
    bench = small_bench(model, clock, device_pages=30, max_running=3, priority_ageing_s=1e6)
    low = bench.add(prompt(60), 120, ignore_eos=True)
    high = bench.add(prompt(60, 1), 120, ignore_eos=True, priority=1)
    while high.reason is None:
        step(bench, clock)
        assert high.id not in [one.request.id for one in bench.core.lineup.away]
    assert bench.core.stats().retractions > 0 and low.reason is None
    bench.run()
    assert len(low.tokens) == 120
    close(bench)


@pytest.mark.parametrize("seed", range(2))
def test_low_priorities_are_served_while_higher_ones_keep_coming(model, seed):
    """Ageing: a step of priority is worth so many seconds of waiting, so the wait of each is bounded."""
    clock, random = Steps(), np.random.default_rng(seed)
    ageing_s = 10.0
    bench = small_bench(model, clock, device_pages=30, max_running=3, priority_ageing_s=ageing_s)
    low = [bench.add(prompt(20, n), 12, ignore_eos=True, priority=0) for n in range(4)]
    came_s: dict[int, float] = {}
    high: list[Answer] = []
    while not all(answer.reason for answer in low):
        if len([one for one in high if not one.reason]) < 5:  # more than can run, without an end
            high.append(
                bench.add(prompt(20, 100 + len(high)), int(random.integers(4, 16)), ignore_eos=True, priority=5)
            )
            came_s[high[-1].id] = clock.now_s
        step(bench, clock)
        assert clock.now_s < 400, "somebody starves"
    assert clock.now_s > 5 * ageing_s / 2, "higher priorities did go first"
    late = [one for one in high if came_s[one.id] > 5 * ageing_s]
    assert bench.core.stats().preemptions > 0
    assert all(answer.reason == "length" for answer in low)
    assert len([one for one in late if one.reason]) <= 3, "who came after that did not overtake them"
    bench.run()
    close(bench)
