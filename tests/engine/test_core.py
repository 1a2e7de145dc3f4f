"""Every request gets the tokens it would get alone without a cache, whatever is shared, short or broken."""

from dataclasses import replace

import numpy as np
import pytest

from hicache.engine.executor import Executor
from hicache.engine.work import CoreOptions
from hicache.errors import InvariantError, StorageError
from hicache.storage.memory import MemoryBackend
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.units import Tier
from tests.engine.bench import MODEL, Bench, mixed_prompts
from tests.engine.tiny import PAGE, prompt


@pytest.fixture(scope="module")
def alone(model):
    """Answers one by one, each on a fresh prefix: nothing is ever shared, loaded or batched."""
    known: dict[tuple[int, ...], list[int]] = {}
    bench = Bench(model)

    def answer(ids: list[int], max_tokens: int = 8) -> list[int]:
        key = (max_tokens, *ids)
        if key not in known:
            known[key] = bench.ask(ids, max_tokens, salt=str(len(known))).tokens
        return known[key]

    yield answer
    bench.core.close()


@pytest.fixture
def bench(model):
    bench = Bench(model)
    yield bench
    bench.core.close()


def test_the_second_time_all_but_the_last_page_is_on_the_device(bench, alone):
    ids = prompt(100)
    cold, warm = bench.ask(ids), bench.ask(ids)
    assert cold.tokens == warm.tokens == alone(ids)
    assert cold.cached == {"device": 0, "host": 0, "storage": 0}
    assert warm.cached == {"device": 96, "host": 0, "storage": 0}


def test_at_least_one_token_is_computed(bench, alone):
    ids = prompt(96)
    bench.ask(ids)
    warm = bench.ask(ids)
    assert warm.cached["device"] == 96 - PAGE
    assert warm.tokens == alone(ids)


def test_an_answer_is_part_of_the_next_turns_prefix(bench, alone):
    ids = prompt(50)
    first = bench.ask(ids, 30)
    turn = ids + first.tokens + prompt(20, seed=9)
    second = bench.ask(turn)
    assert second.cached["device"] == (50 + 29) // PAGE * PAGE
    assert second.tokens == alone(turn)


def test_a_host_hit_gives_the_same_tokens(bench, alone):
    ids = prompt(100)
    bench.ask(ids)
    bench.settle()
    assert bench.cache.evict(Tier.DEVICE) == 13
    warm = bench.ask(ids)
    assert warm.cached == {"device": 0, "host": 96, "storage": 0}
    assert warm.tokens == alone(ids)


def test_a_storage_hit_gives_the_same_tokens(model, alone):
    backend, ids = MemoryBackend(), prompt(100)
    first = Bench(model, backend=backend)
    first.ask(ids)
    first.settle()
    second = Bench(model, backend=backend)
    warm = second.ask(ids)
    assert warm.cached == {"device": 0, "host": 0, "storage": 96}
    assert warm.tokens == alone(ids)
    second.core.close()
    first.core.close()


def test_another_salt_shares_nothing(bench):
    ids = prompt(100)
    bench.ask(ids, salt="a")
    assert bench.ask(ids, salt="b").cached["device"] == 0
    assert bench.ask(ids).cached["device"] == 0
    assert bench.ask(ids, salt="a").cached["device"] == 96


def test_requests_that_come_together_compute_a_shared_prefix_once(bench, alone):
    head = prompt(104)
    prompts = [head + prompt(10, seed=seed) for seed in range(1, 6)]
    answers = [bench.add(ids) for ids in prompts]
    bench.run()
    assert [answer.tokens for answer in answers] == [alone(ids) for ids in prompts]
    assert [answer.cached["device"] for answer in answers] == [0, 104, 104, 104, 104]
    assert bench.core.stats().prefill_tokens == 104 + 5 * 10


def test_a_long_prompt_does_not_stop_others_from_decoding(bench):
    first = bench.add(prompt(10), 40)
    for _ in range(3):
        bench.core.step()
    bench.add(prompt(600, seed=1), 4)
    shown = len(first.tokens)
    for _ in range(5):
        bench.core.step()
    assert len(first.tokens) == shown + 5
    bench.run()


def test_a_step_computes_no_more_prompt_tokens_than_a_chunk(bench):
    bench.add(prompt(150))
    bench.core.step()
    assert bench.core.stats().prefill_tokens == 64
    bench.core.step()
    assert bench.core.stats().prefill_tokens == 128
    bench.add(prompt(100, seed=1))
    bench.core.step()
    assert bench.core.stats().prefill_tokens == 192
    bench.run()


def test_no_more_run_than_may(model):
    bench = Bench(model, options=CoreOptions(max_running=3, chunk_tokens=512))
    answers = [bench.add(prompt(5, seed=seed), 6) for seed in range(8)]
    bench.core.step()
    assert (bench.core.stats().running, bench.core.stats().waiting) == (3, 5)
    bench.run()
    assert [answer.reason for answer in answers] == ["length"] * 8


def test_the_end_of_text_token_stops_and_can_be_ignored(bench, alone):
    ids = prompt(20)
    tokens = alone(ids, 20)
    stopped = bench.ask(ids, 20, stop_token_ids=(tokens[3],))
    cut = tokens.index(tokens[3]) + 1
    assert stopped.tokens == tokens[:cut]
    assert stopped.reason == "stop"


def test_a_stop_string_ends_the_answer_before_it(bench, alone):
    ids = prompt(20)
    letters = [chr(0x4E00 + token) for token in alone(ids, 20)]
    at = next(i for i in range(2, 19) if letters[i] not in letters[:i] and letters[i + 1] not in letters[: i + 1])
    answer = bench.ask(ids, 20, stop=(letters[at] + letters[at + 1],))
    assert "".join(chunk.text for chunk in answer.chunks) == "".join(letters[:at])
    assert answer.reason == "stop"
    assert len(answer.tokens) == at + 2


def test_a_seed_fixes_the_answer_whatever_else_runs(bench):
    ids, sampled = prompt(40), {"temperature": 1.2, "top_p": 0.9, "seed": 11}
    expected = bench.ask(ids, 12, **sampled).tokens
    others = [bench.add(prompt(30, seed=seed), 12, temperature=1.0, ignore_eos=True) for seed in range(1, 5)]
    again = bench.add(ids, 12, **sampled)
    bench.run()
    assert again.tokens == expected
    assert bench.ask(ids, 12, **(sampled | {"seed": 12})).tokens != expected
    assert all(other.reason == "length" for other in others)


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_an_abort_at_any_point_gives_everything_back(model, steps):
    bench = Bench(model, backend=MemoryBackend())
    answers = [bench.add(ids, 12) for ids in mixed_prompts(5, seed=1)]
    for _ in range(steps):
        bench.core.step()
    for answer in answers[::2]:
        bench.core.abort(answer.id)
    bench.run()
    bench.settle()
    assert [answer.reason for answer in answers[1::2]] == ["length"] * 2
    assert all(answer.chunks and answer.reason in ("abort", "length") for answer in answers)
    bench.core.abort(answers[0].id)
    bench.settle()
    bench.idle()
    bench.core.close()


def test_when_memory_runs_out_the_youngest_gives_way_and_all_get_their_tokens(model, alone):
    bench = Bench(model, device_pages=30, host_pages=200)
    prompts = [prompt(60, seed=seed) for seed in range(1, 6)]
    answers = [bench.add(ids, 90) for ids in prompts]
    bench.run()
    assert bench.core.stats().preemptions > 0
    assert [answer.tokens for answer in answers] == [alone(ids, 90) for ids in prompts]
    assert [answer.cached["device"] for answer in answers] == [0] * 5
    bench.settle()
    bench.idle()
    bench.core.close()


def test_sampled_answers_survive_being_preempted(model):
    roomy, tight = Bench(model), Bench(model, device_pages=30, host_pages=200)
    answers = []
    for bench in (roomy, tight):
        asked = [bench.add(prompt(60, seed=s), 90, temperature=1.0, seed=s) for s in range(1, 5)]
        bench.run()
        answers.append([answer.tokens for answer in asked])
    assert tight.core.stats().preemptions > 0
    assert answers[0] == answers[1]
    roomy.core.close()
    tight.core.close()


def test_a_request_as_large_as_the_pool_runs(model, alone):
    bench = Bench(model, device_pages=20, host_pages=20)
    bench.ask(prompt(100, seed=2))
    ids = prompt(20 * PAGE - 8, seed=3)
    assert bench.ask(ids).tokens == alone(ids)
    bench.core.close()


def test_the_oldest_waits_for_memory_and_is_served_first(model):
    bench = Bench(model, device_pages=24, host_pages=100)
    bench.add(prompt(100), 30)
    for _ in range(3):
        bench.core.step()
    ended: list[str] = []
    large = bench.add(prompt(150, seed=1), 2)
    small = bench.add(prompt(20, seed=2), 2)
    while bench.core.has_work:
        bench.core.step()
        for name, answer in (("large", large), ("small", small)):
            if answer.reason and name not in ended:
                ended.append(name)
    assert ended == ["large", "small"]
    bench.core.close()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 30))])
def test_late_failed_and_lost_transfers_change_no_token(model, alone, seed, write_policy):
    rates = FaultRates(start=0.3, fail=0.15, partial=0.15, lose=0.02)
    bench = Bench(
        model,
        device_pages=45,
        host_pages=90,
        transfers=SimulatedExecutor(seed, rates),
        timeout_s=1e-6,
        write_policy=write_policy,
    )
    random = np.random.default_rng(seed)
    prompts = mixed_prompts(14, seed)
    answers = []
    for ids in prompts:
        answers.append(bench.add(ids, 10))
        for _ in range(random.integers(4)):
            bench.core.step()
        if random.random() < 0.2:
            bench.core.abort(answers[random.integers(len(answers))].id)
    bench.run()
    for ids, answer in zip(prompts, answers, strict=True):
        if answer.reason == "abort":
            assert answer.tokens == alone(ids, 10)[: len(answer.tokens)]
        else:
            assert answer.tokens == alone(ids, 10)
    bench.cache.audit()
    assert bench.cache.stats().open_matches == 0
    bench.core.close()


def test_a_load_that_comes_short_voids_the_step_and_is_planned_again(model, alone):
    bench = Bench(model, transfers=SimulatedExecutor(0, FaultRates(start=1.0, partial=1.0)), timeout_s=1e-6)
    ids = prompt(100)
    bench.ask(ids)
    bench.settle()
    for _ in range(3):
        bench.cache.evict(Tier.DEVICE)
        bench.settle()
    assert bench.ask(ids).tokens == alone(ids)
    assert bench.core.stats().void_steps > 0
    bench.core.close()


class Failing(Executor):
    """Fails whenever a certain token is among those to compute."""

    token = 249

    def run(self, segments, before_layer=lambda layer: None):
        if any(self.token in segment.token_ids for segment in segments):
            raise RuntimeError("that token again")
        return super().run(segments, before_layer)


def test_a_request_that_fails_takes_no_other_with_it(bench, alone, model):
    bench.core._executor = Failing(model, MODEL, bench.executor.pools, 1024)
    prompts = [[token for token in ids if token != Failing.token] for ids in mixed_prompts(4, seed=2)]
    bad = bench.add([*prompt(10, seed=5), Failing.token], 8)
    good = [bench.add(ids, 8) for ids in prompts]
    bench.run()
    assert (bad.reason, bad.chunks[-1].error) == ("error", "RuntimeError: that token again")
    assert [answer.tokens for answer in good] == [alone(ids) for ids in prompts]
    assert bench.core.stats().failed_requests == 1
    bench.settle()
    bench.idle()


def test_logits_that_are_no_numbers_are_an_error_not_an_answer(bench):
    class NotNumbers(Executor):
        def run(self, segments, before_layer=lambda layer: None):
            outputs = super().run(segments, before_layer)
            return [replace(output, logits=output.logits * float("nan")) for output in outputs]

    bench.core._executor = NotNumbers(bench.executor._model, MODEL, bench.executor.pools, 1024)
    answer = bench.ask(prompt(5))
    assert answer.reason == "error"
    assert "not numbers" in answer.chunks[-1].error
    bench.settle()
    bench.idle()


def test_a_bug_is_not_caught(bench):
    class Wrong(Executor):
        def run(self, segments, before_layer=lambda layer: None):
            raise InvariantError("two owners")

    bench.core._executor = Wrong(bench.executor._model, MODEL, bench.executor.pools, 1024)
    bench.add(prompt(5))
    with pytest.raises(InvariantError, match="two owners"):
        bench.core.step()


def test_a_storage_that_fails_costs_nothing_but_the_hit(model, alone):
    class Broken(MemoryBackend):
        def contains(self, keys):
            raise StorageError("gone")

    bench = Bench(model, backend=Broken())
    ids = prompt(60)
    assert bench.ask(ids).tokens == alone(ids)
    bench.settle()
    bench.idle()
    bench.core.close()
