"""A request that gives way keeps all that was computed, comes back to other slots, and answers as if it never left."""

from typing import Any

import numpy as np
import pytest

from hicache.builder import describe_model
from hicache.engine.core import EngineCore
from hicache.engine.model import CausalModel
from hicache.engine.work import CoreOptions
from hicache.storage.memory import MemoryBackend
from hicache.testing.families import TINY, build_tiny
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.units import DeviceSlots, Tier
from tests.engine.bench import Answer, Bench
from tests.engine.tiny import PAGE, prompt

SOME = ("llama", "gemma3_text", "deepseek_v32", "qwen3_next", "mamba2", "lfm2")
FAMILIES = [pytest.param(family, marks=() if family in SOME else pytest.mark.full) for family in TINY]


def family_bench(family: str, transfers: SimulatedExecutor | None = None, **options: Any) -> Bench:
    module = build_tiny(family)
    description = describe_model(module.config, PAGE, "float32")
    limits = CoreOptions(max_running=3, chunk_tokens=16, **options)
    return Bench(CausalModel(module), description, device_pages=60, host_pages=120, options=limits, transfers=transfers)


def ask(bench: Bench) -> list[Answer]:
    return [bench.add(prompt(40) + prompt(10, seed), 20, ignore_eos=True) for seed in range(3)]


def give_way(core: EngineCore, index: int) -> None:
    """Make a running request give way, as if the device were full."""
    core.preemption.preempt(core.lineup.running[index])


def finish(bench: Bench, seed: int | None = None) -> None:
    """Step to the end; with a seed, requests give way at random."""
    random = np.random.default_rng(seed)
    for step in range(5000):
        if not bench.core.has_work:
            bench.settle()
            bench.idle()
            return
        bench.core.step()
        settled = [i for i, one in enumerate(bench.core.lineup.running) if not one.loading]
        if seed is not None and settled and random.random() < 0.3:
            give_way(bench.core, int(random.choice(settled)))
        if step % 7 == 0:
            bench.cache.audit()
    raise AssertionError("still at work")


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_same_however_often_requests_give_way(family: str):
    expected: list[list[int]] = []
    for seed in (None, 1, 2):
        bench = family_bench(family)
        answers = ask(bench)
        finish(bench, seed)
        stats, counters = bench.core.stats(), bench.cache.stats().counters
        expected = expected or [answer.tokens for answer in answers]
        assert [answer.tokens for answer in answers] == expected
        assert stats.prefill_tokens <= 150, "nothing was computed twice"
        assert stats.retractions == stats.preemptions == counters["retraction_restores"]
        assert (stats.retractions > 0) == (seed is not None)
        bench.core.close()


def planned(bench: Bench, ids: list[int]) -> Answer:
    """A request that has slots for its next step, whose load has settled, and that gives way before the step is run."""
    answer = bench.add(ids, 20, ignore_eos=True)
    while not bench.core.lineup.running or not bench.core.lineup.running[0]._settled:
        bench.core.cache.poll()
        bench.core.planner.plan()
    give_way(bench.core, 0)
    return answer


def test_a_snapshot_that_was_to_be_taken_when_a_request_gave_way_is_taken_later():
    bench = family_bench("qwen3_next")
    ids = prompt(PAGE + 3)
    expected = bench.ask(ids, 20, ignore_eos=True, salt="alone").tokens
    answer = planned(bench, ids)
    bench.run()
    again = bench.ask(ids, 20, ignore_eos=True)
    assert answer.tokens == again.tokens == expected
    assert again.cached["device"] == PAGE
    bench.core.close()


def test_a_request_that_gives_way_before_its_first_step_goes_on_from_the_snapshot_wherever_that_is_then():
    bench = family_bench("qwen3_next")
    expected = bench.ask(prompt(40), 20, ignore_eos=True).tokens
    cached = bench.cache.match_prefix(np.array(prompt(40), np.uint32), bench.namespace)
    left = int(cached.slots("state")[32 // PAGE - 1])
    bench.cache.release(cached)
    answer = planned(bench, prompt(40))
    bench.settle_transfers()
    bench.cache.evict(Tier.DEVICE)
    others = bench.cache.match_prefix(np.array(prompt(16, 5), np.uint32), bench.namespace.with_salt("other"))
    assert bench.cache.allocate(others, 16, checkpoint=True) is not None
    bench.executor.pools["state"].zero(DeviceSlots(np.array([left], np.int32)))
    bench.core.step()
    assert bench.core.lineup.running[0]._match.slots("state")[32 // PAGE - 1] != left
    bench.run()
    assert answer.tokens == expected
    bench.cache.release(others)
    bench.settle()
    bench.idle()
    bench.core.close()


def test_a_request_that_is_lost_before_its_first_step_begins_again():
    transfers = SimulatedExecutor(3, FaultRates(start=1.0))
    bench = family_bench("qwen3_next", transfers)
    expected = bench.ask(prompt(40), 20, ignore_eos=True).tokens
    bench.settle_transfers()
    transfers.rates = FaultRates(start=1.0, fail=1.0)
    answer = planned(bench, prompt(40))
    assert bench.core.lineup.away[0]._resumes
    bench.run()
    assert bench.cache.stats().counters["retraction_lost"] == 1
    assert answer.tokens == expected
    bench.settle()
    bench.idle()
    bench.core.close()


def test_memory_that_is_short_is_made_by_retraction_and_nothing_is_computed_again(model):
    answers = {}
    for pages, retract in ((400, True), (34, True), (34, False)):
        bench = Bench(model, device_pages=pages, options=CoreOptions(max_running=5, chunk_tokens=32, retract=retract))
        asked = [bench.add(prompt(60, seed), 90, ignore_eos=True) for seed in range(5)]
        bench.run()
        answers[pages, retract] = [answer.tokens for answer in asked]
        stats = bench.core.stats()
        assert (stats.preemptions > 0) == (pages == 34)
        assert (stats.retractions > 0) == (pages == 34 and retract)
        assert (stats.prefill_tokens > 5 * 60) == (pages == 34 and not retract)
        bench.settle()
        bench.idle()
        bench.core.close()
    assert answers[34, True] == answers[34, False] == answers[400, True]


def test_a_request_that_is_away_can_be_aborted(model):
    bench = Bench(model)
    first, second = (bench.add(prompt(60, seed), 30, ignore_eos=True) for seed in (1, 2))
    for _ in range(4):
        bench.core.step()
    give_way(bench.core, 1)
    assert bench.core.stats().retracted == 1
    bench.core.abort(second.id)
    bench.run()
    assert (first.reason, second.reason) == ("length", "abort")
    bench.settle()
    bench.idle()
    bench.core.close()


def test_what_was_lost_while_a_request_was_away_is_computed_again(model):
    alone = Bench(model)
    expected = alone.ask(prompt(60), 30, ignore_eos=True).tokens
    alone.core.close()
    bench = Bench(model, transfers=SimulatedExecutor(3, FaultRates(start=1.0, fail=1.0)))
    answer = bench.add(prompt(60), 30, ignore_eos=True)
    for _ in range(4):
        bench.core.step()
    give_way(bench.core, 0)
    bench.run()
    assert answer.tokens == expected
    assert bench.cache.stats().counters["retraction_lost"] == 1
    bench.settle()
    bench.idle()
    bench.core.close()


def test_who_was_lost_takes_the_place_of_nobody(model):
    options = CoreOptions(max_running=1, chunk_tokens=64)
    bench = Bench(model, options=options, transfers=SimulatedExecutor(3, FaultRates(start=1.0, fail=1.0)))
    low = bench.add(prompt(60), 30, ignore_eos=True)
    for _ in range(4):
        bench.core.step()
    high = bench.add(prompt(20, 1), 20, ignore_eos=True, priority=1)
    while bench.core.has_work:
        bench.core.step()
        assert len(bench.core.lineup.running) <= 1
    assert bench.cache.stats().counters["retraction_lost"] == 1
    assert (low.reason, high.reason) == ("length", "length")
    bench.settle()
    bench.idle()
    bench.core.close()


def test_a_host_without_room_hands_the_request_on_to_storage(model):
    bench = Bench(model, host_pages=4, backend=MemoryBackend())
    answer = bench.add(prompt(60), 30, ignore_eos=True)
    for _ in range(4):
        bench.core.step()
    give_way(bench.core, 0)
    bench.run()
    assert len(answer.tokens) == 30
    assert bench.cache.stats().counters["retraction_spilled"] == 1
    assert bench.core.stats().prefill_tokens == 60
    bench.settle()
    bench.idle()
    bench.core.close()


def test_the_longest_away_comes_back_first_and_nobody_overtakes(model):
    bench = Bench(model, device_pages=40, options=CoreOptions(max_running=3, chunk_tokens=64))
    answers = [bench.add(prompt(20, seed), 40, ignore_eos=True) for seed in range(3)]
    for _ in range(4):
        bench.core.step()
    for index in (2, 1):
        bench.core.preemption.preempt(bench.core.lineup.running[index])
    late = bench.add(prompt(20, 9), 5, ignore_eos=True)
    bench.settle_transfers()
    held = bench.cache.match_prefix(np.array(prompt(16, 5), np.uint32), bench.namespace.with_salt("other"))
    assert bench.cache.allocate(held, (bench.cache.room()["kv"] - 8) * PAGE) is not None
    while answers[0].reason is None:
        bench.core.step()
        assert [one.request.id for one in bench.core.lineup.running] in ([answers[0].id], [])
    bench.cache.release(held)
    bench.core.step()
    while bench.core.transfers_in_flight and len(bench.core.lineup.running) < 3:
        bench.core.step()
    bench.core.step()
    assert [one.request.id for one in bench.core.lineup.running] == [answers[1].id, answers[2].id, late.id]
    bench.run()
    bench.settle()
    bench.idle()
    bench.core.close()
