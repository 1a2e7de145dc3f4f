"""MTP layers guess what they guess in transformers, wherever the state of the tokens before came from."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache.builder import describe_model
from hicache.engine.checkpoint import open_checkpoint
from hicache.engine.drafts import DraftSettings, plan_draft
from hicache.engine.model import CausalModel, load_model
from hicache.engine.mtp import with_mtp
from hicache.errors import ConfigError
from hicache.storage.memory import MemoryBackend
from hicache.testing.families import tiny_config, write_tiny
from tests.engine.bench import Bench
from tests.engine.drafters import OPTIONS, Recorder, counted, forget_device
from tests.engine.mtp_checkpoint import Reference, write_mtp
from tests.engine.tiny import PAGE, ask, prompt, running, settings

SHAPES = [("deepseek_v3", 3, 1), ("deepseek_v3", 2, 2), ("deepseek_v3", 2, 3), ("glm4_moe", 3, 2)]
"""Families with layers and MTP layers: fewer than layers, as many, more."""


class Speculating:
    """A checkpoint with MTP layers, ready to make cores over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = open_checkpoint(folder, "float32", PAGE)
        self.reference = Reference(folder)
        self.model: CausalModel = load_model(folder, torch.float32)

    def plain(self) -> Bench:
        return Bench(self.model, self.checkpoint.description, options=OPTIONS)

    def bench(self, most: int = 4, **changes) -> Bench:
        plan = plan_draft(DraftSettings("mtp", most, "float32", PAGE, self.folder), self.checkpoint)
        bench = Bench(self.model, self.checkpoint.description, draft=plan, **{"options": OPTIONS, **changes})
        bench.drafter = bench.core._drafting.drafter = Recorder(bench.drafter)
        return bench


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    known: dict[tuple[str, int, int], Speculating] = {}

    def make(family: str, layers: int, depths: int) -> Speculating:
        key = (family, layers, depths)
        if key not in known:
            known[key] = Speculating(write_mtp(family, tmp_path_factory.mktemp("mtp"), layers, depths))
        return known[key]

    return make


@pytest.fixture(scope="module")
def two(made):
    """The checkpoint that most tests use: two MTP layers."""
    return made("deepseek_v3", 2, 2)


def end(bench: Bench) -> None:
    bench.settle()
    bench.idle()
    bench.core.close()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_guesses_are_those_of_transformers_and_change_no_token(made, shape):
    speculating, ids = made(*shape), prompt(45)
    bench = speculating.bench()
    assert bench.ask(ids, 24, ignore_eos=True).tokens == speculating.reference.answer(ids, 24)
    assert (bench.drafter.most, bench.drafter.lookahead) == (shape[2], shape[2])
    drafted, accepted = counted(bench)
    assert 0 < accepted < drafted
    assert len(bench.drafter.known[0]) == 46
    for known, guess in zip(bench.drafter.known, bench.drafter.guesses, strict=True):
        assert guess == speculating.reference.guesses(known)[: len(guess)] != []
    end(bench)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_guesses_are_the_same_after_a_hit_on_every_tier(made, shape):
    speculating, backend, ids = made(*shape), MemoryBackend(), prompt(75)
    first, second = (speculating.bench(backend=backend) for _ in range(2))
    found = []
    for bench in (first, first, first, second):
        if len(found) == 2:
            forget_device(first)
        answer = bench.ask(ids, 20, ignore_eos=True)
        bench.settle()
        found.append((answer.tokens, bench.drafter.take(), list(answer.cached.values())))
    assert [tiers for _, _, tiers in found] == [[0, 0, 0], [72, 0, 0], [0, 72, 0], [0, 0, 72]]
    assert [tokens for tokens, _, _ in found] == [speculating.reference.answer(ids, 20)] * 4
    assert [guesses for _, guesses, _ in found[1:]] == [found[0][1]] * 3
    assert counted(second)[1] > 0
    end(first)
    second.idle()
    second.core.close()


def test_a_page_is_another_where_the_tokens_that_it_looks_ahead_to_are(two):
    """Prompts that part one token after a page do not share it: its rows have seen that token."""
    head, tail = prompt(16), prompt(20, seed=1)
    bench, alone = two.bench(), two.bench()
    for first, shared in ((3, 0), (4, 8), (3, 32)):
        ids = [*head, first, *tail]
        answer = bench.ask(ids, 8, ignore_eos=True)
        guesses = bench.drafter.take()
        assert answer.cached["device"] == shared
        assert answer.tokens == alone.ask(ids, 8, ignore_eos=True, salt=str((first, shared))).tokens
        assert guesses == alone.drafter.take()
    end(bench)
    end(alone)


def test_the_state_in_the_pages_is_what_a_prompt_leaves(two):
    """Whatever was guessed in between, and computed again."""
    ids = prompt(21)
    bench, other = two.bench(), two.bench()
    whole = ids + bench.ask(ids, 40, ignore_eos=True).tokens
    other.ask([*whole, 7, 7], 1)
    pages = []
    for one in (bench, other):
        match = one.cache.match_prefix(np.array(whole, np.uint32), one.namespace)
        assert match.device_tokens == 56
        pages.append(one.executor.pools["latent.draft0"].stage(match.slots()).view(np.float32))
        one.cache.release(match)
        end(one)
    np.testing.assert_allclose(*pages, rtol=1e-3, atol=1e-4)


def test_an_answers_pages_are_shared_as_far_as_their_tokens_are_known(two):
    ids = prompt(40)
    bench = two.bench()
    asked = bench.add(ids, 30, ignore_eos=True)
    device_tokens = partial(shared_tokens, bench)
    while not asked.tokens:
        bench.core.step()
    assert device_tokens([*ids, *asked.tokens, 0, 0]) == 32
    while len(asked.tokens) < 3:
        bench.core.step()
    assert device_tokens([*ids, *asked.tokens, 0, 0]) == 40
    bench.run()
    assert device_tokens([*ids, *asked.tokens, 0, 0]) == 64
    end(bench)


def test_an_answer_that_ends_where_a_page_does_leaves_that_page(made):
    ids = prompt(40)
    bench = made("deepseek_v3", 3, 1).bench()
    whole = ids + bench.ask(ids, 9, ignore_eos=True).tokens
    assert shared_tokens(bench, [*whole, 0]) == 48
    end(bench)


def test_only_rows_that_are_not_final_are_computed_again(two, monkeypatch):
    """Those that had to use guesses, and those of the tokens that the model has computed since."""
    bench, counts = two.bench(), []
    layers = bench.drafter.drafter._layers
    forward = layers.forward

    def counting(depth, hidden, step):
        counts.append(len(hidden))
        return forward(depth, hidden, step)

    monkeypatch.setattr(layers, "forward", counting)
    bench.ask(prompt(20), 24, ignore_eos=True)
    assert counts[:2] == [19, 19]
    assert max(counts[2:]) <= 2 * bench.drafter.most
    end(bench)


def shared_tokens(bench: Bench, ids: list[int]) -> int:
    match = bench.cache.match_prefix(np.array(ids, np.uint32), bench.namespace)
    bench.cache.release(match)
    return match.device_tokens


def test_fewer_tokens_at_a_time_use_fewer_depths(made):
    speculating, ids = made("deepseek_v3", 2, 3), prompt(45)
    bench = speculating.bench(most=1)
    assert bench.ask(ids, 12, ignore_eos=True).tokens == speculating.reference.answer(ids, 12)
    assert {len(guess) for guess in bench.drafter.guesses} == {1}
    for known, guess in zip(bench.drafter.known, bench.drafter.guesses, strict=True):
        assert guess == speculating.reference.guesses(known)[:1]
    end(bench)


def test_many_at_once_with_prompts_in_the_same_steps(two):
    prompts = [prompt(40)[: 20 + 3 * index] + prompt(8, seed=index) for index in range(5)]
    bench, plain = two.bench(), two.plain()
    asked = []
    for ids in prompts:
        asked.append(bench.add(ids, 16, ignore_eos=True))
        bench.core.step()
    bench.run()
    assert [one.tokens for one in asked] == [plain.ask(ids, 16, ignore_eos=True).tokens for ids in prompts]
    for known, guess in zip(bench.drafter.known[::5], bench.drafter.guesses[::5], strict=True):
        assert guess == two.reference.guesses(known)[: len(guess)]
    assert counted(bench)[1] > 0
    end(bench)
    plain.core.close()


def test_sampled_answers_are_the_same(two):
    ids, sampled = prompt(30), {"temperature": 0.8, "seed": 5, "ignore_eos": True}
    bench, plain = two.bench(), two.plain()
    assert bench.ask(ids, 20, **sampled).tokens == plain.ask(ids, 20, **sampled).tokens
    end(bench)
    plain.core.close()


def test_when_memory_runs_out_and_some_leave_all_others_get_their_tokens(two):
    prompts = [prompt(60, seed=seed) for seed in range(1, 6)]
    bench, plain = two.bench(device_pages=30, host_pages=200), two.plain()
    asked = [bench.add(ids, 90, ignore_eos=True) for ids in prompts]
    for _ in range(12):
        bench.core.step()
    bench.core.abort(asked[1].id)
    bench.run()
    assert bench.core.stats().preemptions > 0
    for index, (ids, one) in enumerate(zip(prompts, asked, strict=True)):
        expected = plain.ask(ids, 90, ignore_eos=True).tokens
        assert one.tokens == (expected[: len(one.tokens)] if index == 1 else expected)
    assert counted(bench)[1] > 0
    end(bench)
    plain.core.close()


def test_a_checkpoint_without_mtp_layers_is_refused_by_name(checkpoint, tmp_path):
    asked = DraftSettings("mtp", 4, "float32", PAGE, tmp_path)
    with pytest.raises(ConfigError, match="draft=mtp: the checkpoint of model type 'llama' has no MTP layers"):
        plan_draft(asked, open_checkpoint(checkpoint, "float32", PAGE))
    stripped = write_tiny("deepseek_v3", tmp_path / "stripped")
    with pytest.raises(ConfigError, match="draft=mtp: the checkpoint of model type 'deepseek_v3' has no MTP layers"):
        plan_draft(asked, open_checkpoint(stripped, "float32", PAGE))


@pytest.mark.parametrize(("family", "pools"), [("gemma3_text", "'kv', 'swa'"), ("deepseek_v32", "'latent', 'indexer'")])
def test_a_model_with_pools_that_the_layers_have_no_part_in_is_refused(family, pools):
    with pytest.raises(ConfigError, match=f"the model keeps {pools}; MTP layers are run beside one pool"):
        with_mtp(describe_model(tiny_config(family), PAGE), 1)


def test_an_engine_runs_the_layers_that_come_with_its_model(two, cache_folder):
    ids = prompt(50)
    namespaces = set()
    for changes in ({}, {"draft": "mtp"}, {"draft": "mtp", "draft_tokens": 1}):
        with running(settings(two.folder, cache_folder, **changes)) as engine:
            assert ask(engine, ids, 20, ignore_eos=True)[0] == two.reference.answer(ids, 20)
            stats = engine.call(lambda core: core.stats())
            assert (stats.drafted_tokens > 0) == bool(changes)
            namespaces.add(engine.info.namespace.fingerprint)
            assert engine.info.namespace.draft_lookahead == {0: 0, 1: 2, 2: 1}[len(changes)]
    assert len(namespaces) == 3
