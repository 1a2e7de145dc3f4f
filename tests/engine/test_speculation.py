"""Right or wrong guesses, few or many, in any company: the answer is the one without them."""

import numpy as np
import pytest
import torch

from hicache.engine.work import CoreOptions
from tests.engine.bench import Bench, mixed_prompts
from tests.engine.drafters import OPTIONS, Oracle, counted, source, tiny
from tests.engine.tiny import PAGE, prompt

FAMILIES = ["llama", "gemma3_text", "qwen3_next"]


@pytest.fixture(scope="module")
def expected():
    """Answers without speculation, of one core per family."""
    benches: dict[str, Bench] = {}
    known: dict[tuple[object, ...], list[int]] = {}

    def answer(family: str, ids: list[int], max_tokens: int, **params) -> list[int]:
        key = (family, max_tokens, *ids, *params.items())
        if key not in known:
            if family not in benches:
                benches[family] = Bench(*tiny(family), options=OPTIONS)
            known[key] = benches[family].ask(ids, max_tokens, ignore_eos=True, **params).tokens
        return known[key]

    yield answer
    for bench in benches.values():
        bench.core.close()


def bench_of(family: str, oracle: Oracle, **changes) -> Bench:
    return Bench(*tiny(family), drafter=oracle, options=changes.pop("options", OPTIONS), **changes)


def oracle_of(family: str, sequences, **changes) -> Oracle:
    return Oracle(sequences, source(tiny(family)[1]), **changes)


def end(bench: Bench) -> None:
    bench.settle()
    bench.idle()
    bench.core.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_right_guesses_are_all_accepted_and_save_steps(family, expected):
    ids = prompt(45)
    answer = expected(family, ids, 21)
    bench = bench_of(family, oracle_of(family, [ids + answer]))
    assert bench.ask(ids, 21, ignore_eos=True).tokens == answer
    drafted, accepted = counted(bench)
    assert drafted == accepted > 0
    assert bench.core.stats().decode_tokens == 20
    assert bench.core.stats().steps <= 2 + 7
    end(bench)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_guesses_are_never_accepted_and_change_nothing(family, expected):
    ids = prompt(45)
    answer = expected(family, ids, 21)
    bench = bench_of(family, oracle_of(family, [ids + answer], wrong=lambda position: True))
    assert bench.ask(ids, 21, ignore_eos=True).tokens == answer
    drafted, accepted = counted(bench)
    assert drafted > 40 and accepted == 0
    end(bench)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_at_once_with_prompts_in_the_same_steps(family, expected):
    prompts = mixed_prompts(7, seed=4)
    answers = [expected(family, ids, 14) for ids in prompts]
    oracle = oracle_of(
        family, [one + answer for one, answer in zip(prompts, answers, strict=True)], wrong=lambda p: p % 5 == 3
    )
    bench = bench_of(family, oracle)
    asked = []
    for ids in prompts:
        asked.append(bench.add(ids, 14, ignore_eos=True))
        bench.core.step()
    bench.run()
    assert [one.tokens for one in asked] == answers
    drafted, accepted = counted(bench)
    assert 0 < accepted < drafted
    end(bench)


def test_sampled_answers_are_the_same_and_guesses_of_them_accepted(expected):
    ids, sampled = prompt(30), {"temperature": 1.3, "top_p": 0.95, "seed": 5}
    answer = expected("llama", ids, 20, **sampled)
    assert answer != expected("llama", ids, 20)
    bench = bench_of("llama", oracle_of("llama", [ids + answer], wrong=lambda position: position % 7 == 0))
    assert bench.ask(ids, 20, ignore_eos=True, **sampled).tokens == answer
    assert counted(bench)[1] > 10
    end(bench)


def test_a_stop_token_among_the_accepted_ends_the_answer_there(expected):
    ids = prompt(20)
    answer = expected("llama", ids, 20)
    at = next(i for i in range(3, 20) if answer[i] not in answer[:i] and (i - 1) % 5 < 3)
    bench = bench_of("llama", oracle_of("llama", [ids + answer]))
    stopped = bench.ask(ids, 20, ignore_eos=True, stop_token_ids=(answer[at],))
    assert (stopped.tokens, stopped.reason) == (answer[: at + 1], "stop")
    assert counted(bench)[0] > counted(bench)[1] == at - at // 5
    end(bench)


def test_a_stop_string_among_the_accepted_ends_the_answer_there(expected):
    ids = prompt(20)
    letters = [chr(0x4E00 + token) for token in expected("llama", ids, 20)]
    at = next(i for i in range(2, 19) if letters[i] not in letters[:i] and letters[i + 1] not in letters[: i + 1])
    bench = bench_of("llama", oracle_of("llama", [ids + expected("llama", ids, 20)]))
    stopped = bench.ask(ids, 20, ignore_eos=True, stop=(letters[at] + letters[at + 1],))
    assert "".join(chunk.text for chunk in stopped.chunks) == "".join(letters[:at])
    assert len(stopped.tokens) == at + 2
    end(bench)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_guess_goes_past_the_last_token_that_was_asked_for(max_tokens, expected):
    ids = prompt(20)
    answer = expected("llama", ids, 20)
    bench = bench_of("llama", oracle_of("llama", [ids + answer]))
    asked = bench.ask(ids, max_tokens, ignore_eos=True)
    assert (asked.tokens, asked.reason) == (answer[:max_tokens], "length")
    stats = bench.core.stats()
    assert stats.drafted_tokens == stats.accepted_tokens == stats.decode_tokens - (stats.steps - 1)
    end(bench)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_a_rejected_token_leaves_no_trace_in_the_state(family, expected):
    """The running state after n tokens, and the snapshot at each boundary, are those of a run without guesses."""
    ids = prompt(21)
    whole = ids + expected(family, ids, 30)
    oracle = oracle_of(family, [whole], wrong=lambda position: position % 6 in (1, 2))
    with_guesses = states_of(bench_of(family, oracle), ids, whole)
    without = states_of(Bench(*tiny(family), options=OPTIONS), ids, whole)
    assert len(with_guesses) < len(without)
    assert snapshots(with_guesses) == snapshots(without) != set()
    for key, state in with_guesses.items():
        for mine, theirs in zip(state, without[key], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def states_of(bench: Bench, ids: list[int], whole: list[int]) -> dict[tuple[str, int], list[torch.Tensor]]:
    """The running state after each step, by tokens computed, and the snapshots that the tree has in the end."""
    pool = bench.executor.pools["state"]

    def state(slot: int) -> list[torch.Tensor]:
        layers = enumerate(pool.geometry.layers)
        return [pool.tensor(layer, part)[slot].clone() for layer, specs in layers for part in range(len(specs))]

    found = {}
    bench.add(ids, len(whole) - len(ids), ignore_eos=True)
    while bench.core.has_work:
        bench.core.step()
        for sequence in bench.core.lineup.running:
            found["live", sequence.computed] = state(sequence._match.live_slots["state"])
    match = bench.cache.match_prefix(np.array([*whole, 0], np.uint32), bench.namespace)
    slots = match.slots("state").tolist()
    found |= {("snapshot", page): state(slot) for page, slot in enumerate(slots) if slot >= 0}
    bench.cache.release(match)
    end(bench)
    return found


def snapshots(states: dict[tuple[str, int], list[torch.Tensor]]) -> set[tuple[str, int]]:
    return {key for key in states if key[0] == "snapshot"}


@pytest.mark.parametrize("wrong", [lambda position: False, lambda position: position % 3 == 0])
def test_the_next_turn_resumes_where_it_would_without_guesses(wrong, expected):
    """Snapshots are taken at the same boundaries, and what is resumed from them goes on right."""
    family, ids = "qwen3_next", prompt(21)
    answer = expected(family, ids, 30)
    turn = ids + answer + prompt(6, seed=3)
    plain = Bench(*tiny(family), options=OPTIONS)
    plain.ask(ids, 30, ignore_eos=True)
    cached = plain.ask(turn, 8, ignore_eos=True).cached
    following = expected(family, turn, 8)
    bench = bench_of(family, oracle_of(family, [turn + following, ids + answer], wrong=wrong))
    bench.ask(ids, 30, ignore_eos=True)
    second = bench.ask(turn, 8, ignore_eos=True)
    assert (second.tokens, second.cached) == (following, cached)
    assert cached["device"] == 48
    end(bench)
    end(plain)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_when_memory_runs_out_all_get_their_tokens(family, expected):
    prompts = [prompt(60, seed=seed) for seed in range(1, 5)]
    answers = [expected(family, ids, 90) for ids in prompts]
    oracle = oracle_of(
        family, [one + answer for one, answer in zip(prompts, answers, strict=True)], wrong=lambda p: p % 7 == 0
    )
    pages = {"llama": 30, "gemma3_text": 20, "qwen3_next": 12}[family]
    bench = bench_of(family, oracle, device_pages=pages, host_pages=200)
    asked = [bench.add(ids, 90, ignore_eos=True) for ids in prompts]
    bench.run()
    assert [one.tokens for one in asked] == answers
    assert bench.core.stats().preemptions > 0
    assert 0 < counted(bench)[1] < counted(bench)[0]
    end(bench)


def test_guesses_take_no_memory_that_a_request_needs(expected):
    """The pool is as large as the windows of two requests and what they compute: there is little room for guesses."""
    family, prompts = "mistral", [prompt(12, seed=seed) for seed in (1, 2)]
    answers = [expected(family, ids, 30) for ids in prompts]
    oracle = oracle_of(family, [ids + answer for ids, answer in zip(prompts, answers, strict=True)], most=PAGE * 3)
    bench = bench_of(family, oracle, device_pages=6, host_pages=40)
    asked = [bench.add(ids, 30, ignore_eos=True) for ids in prompts]
    bench.run()
    assert [one.tokens for one in asked] == answers
    assert bench.core.stats().preemptions == 0
    assert len(set(oracle.asked)) > 2
    end(bench)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("steps", [2, 4, 7])
def test_an_abort_in_the_middle_gives_everything_back(family, steps, expected):
    prompts = mixed_prompts(4, seed=1)
    answers = [expected(family, ids, 16) for ids in prompts]
    oracle = oracle_of(
        family, [one + answer for one, answer in zip(prompts, answers, strict=True)], wrong=lambda p: p % 4 == 0
    )
    bench = bench_of(family, oracle)
    asked = [bench.add(ids, 16, ignore_eos=True) for ids in prompts]
    for _ in range(steps):
        bench.core.step()
    for one in asked[::2]:
        bench.core.abort(one.id)
    bench.run()
    for one, answer in zip(asked, answers, strict=True):
        assert one.tokens == answer[: len(one.tokens)]
    assert [one.tokens for one in asked[1::2]] == answers[1::2]
    end(bench)


def test_a_drafter_that_fails_costs_its_guesses_only(expected, caplog):
    class Failing(Oracle):
        def propose(self, leads, counts):
            raise RuntimeError("no idea")

        def settle(self, leads):
            raise RuntimeError("no idea either")

    ids = prompt(20)
    bench = bench_of("llama", Failing([], "kv"))
    assert bench.ask(ids, 20, ignore_eos=True).tokens == expected("llama", ids, 20)
    assert counted(bench) == (0, 0)
    assert "no idea" in caplog.text
    assert bench.ask(ids, 20, ignore_eos=True).cached["device"] == 0
    end(bench)


@pytest.mark.parametrize("fails", ["settle", "propose"])
def test_a_drafter_that_fails_keeps_no_window_from_moving_on(expected, monkeypatch, fails):
    """Pages wait for it to be shared, and only shared ones are let go behind a window: there is no room for all."""
    ids = prompt(60)
    oracle = oracle_of("gemma3_text", [ids])
    monkeypatch.setattr(oracle, fails, lambda *given: 1 / 0)
    small = {"window_ratio": 0.1, "device_size": 23 * tiny("gemma3_text")[1].slot_bytes}
    bench = bench_of("gemma3_text", oracle, options=CoreOptions(max_running=2, chunk_tokens=8), settings=small)
    assert bench.executor.pools["swa"].slots < 2 + 70 // PAGE
    answers = [bench.add(ids, 30, ignore_eos=True) for _ in range(2)]
    bench.run()
    assert [one.tokens for one in answers] == [expected("gemma3_text", ids, 30)] * 2
    end(bench)


def test_a_step_that_fails_ends_the_request_that_made_it_fail(expected):
    """Parts of a step that run alone after a failure run with the same guesses."""
    prompts = [prompt(20, seed=seed) for seed in (1, 2)]
    answers = [expected("llama", ids, 20) for ids in prompts]
    oracle = oracle_of("llama", [ids + answer for ids, answer in zip(prompts, answers, strict=True)])
    bench = bench_of("llama", oracle, options=CoreOptions(max_running=4, chunk_tokens=64))
    good, bad = (bench.add(ids, 20, ignore_eos=True) for ids in prompts)
    run = bench.executor.run

    def failing(segments, before_layer=lambda layer: None):
        if any(segment.token_ids[0] == answers[1][5] and segment.start > 20 for segment in segments):
            raise RuntimeError("that token again")
        return run(segments, before_layer)

    bench.executor.run = failing
    bench.run()
    assert (good.tokens, bad.reason) == (answers[0], "error")
    assert bad.tokens == answers[1][: len(bad.tokens)]
    end(bench)
