"""A draft model's state goes where its target's goes: the same guesses after a device, host and storage hit."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from hicache.builder import describe_model
from hicache.device.torch import TorchDevicePool
from hicache.engine.checkpoint import open_checkpoint
from hicache.engine.drafts import DraftPlan, DraftSettings, FirstLayers, plan_draft
from hicache.engine.executor import Executor
from hicache.engine.model import CausalModel
from hicache.engine.segment import Segment
from hicache.engine.sequence import Sequence
from hicache.errors import ConfigError
from hicache.storage import StorageBackend
from hicache.storage.memory import MemoryBackend
from hicache.testing.families import build_tiny, write_tiny
from hicache.units import DeviceSlots, Tier
from tests.engine.bench import Bench
from tests.engine.drafters import OPTIONS, Recorder, counted, forget_device, tiny
from tests.engine.tiny import PAGE, ask, prompt, running, settings, write_checkpoint


def drafted(family: str, layers: int, backend: StorageBackend | None = None, **changes) -> Bench:
    """A core that drafts with the model's own first layers, its guesses written down."""
    model, description = tiny(family)
    return recorded(Bench(model, description, options=OPTIONS, draft=plan(family, layers), backend=backend, **changes))


def plan(family: str, layers: int, most: int = 4) -> DraftPlan:
    return FirstLayers(tiny(family)[1], layers, most)


def recorded(bench: Bench) -> Bench:
    bench.drafter = bench.core._drafting.drafter = Recorder(bench.drafter)
    return bench


def plain(family: str, ids: list[int], max_tokens: int) -> list[int]:
    bench = Bench(*tiny(family), options=OPTIONS)
    tokens = bench.ask(ids, max_tokens, ignore_eos=True).tokens
    bench.core.close()
    return tokens


def end(bench: Bench) -> None:
    bench.settle()
    bench.idle()
    bench.core.close()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text", "deepseek_v3"])
def test_the_model_itself_guesses_right(family):
    ids = prompt(45)
    bench = drafted(family, tiny(family)[1].layer_count)
    assert bench.ask(ids, 25, ignore_eos=True).tokens == plain(family, ids, 25)
    assert counted(bench) == (19, 19)
    end(bench)


def test_a_poor_draft_changes_nothing():
    ids = prompt(45)
    bench = drafted("llama", 1)
    assert bench.ask(ids, 25, ignore_eos=True).tokens == plain("llama", ids, 25)
    drafts, accepted = counted(bench)
    assert drafts > 60 and accepted < 5
    end(bench)


@pytest.mark.parametrize(("family", "layers"), [("llama", 2), ("gemma3_text", 3), ("deepseek_v3", 3)])
def test_guesses_are_the_same_after_a_hit_on_every_tier(family, layers):
    backend, ids = MemoryBackend(), prompt(75)
    first = drafted(family, layers, backend)
    answers, guesses, cached = [], [], []

    def again(bench: Bench) -> None:
        answer = bench.ask(ids, 24, ignore_eos=True)
        answers.append(answer.tokens)
        guesses.append(bench.drafter.take())
        cached.append(answer.cached)

    again(first)
    again(first)
    forget_device(first)
    again(first)
    second = drafted(family, layers, backend)
    again(second)
    assert [sum(tiers.values()) for tiers in cached] == [0, 72, 72, 72]
    assert [list(tiers.values()).index(72) for tiers in cached[1:]] == [0, 1, 2]
    assert answers == [plain(family, ids, 24)] * 4
    assert guesses[1:] == [guesses[0]] * 3
    drafts, accepted = counted(second)
    assert 0 < accepted < drafts
    end(first)
    end(second)


def test_the_drafts_state_in_the_pages_is_what_it_computes_itself():
    """Whatever was guessed in between, and overwritten."""
    ids = prompt(21)
    bench = drafted("llama", 2)
    whole = ids + bench.ask(ids, 40, ignore_eos=True).tokens
    pool = bench.executor.pools["draft"]
    match = bench.cache.match_prefix(np.array(whole, np.uint32), bench.namespace)
    assert match.device_tokens == 56
    slots = match.slots("kv")
    kept = pool.stage(slots).view(np.float32)
    free = DeviceSlots(np.arange(150, 150 + len(slots), dtype=np.int32))
    executor: Executor = bench.drafter.drafter._executor
    executor.run([Segment(np.array(whole[:56], np.uint32), 0, {"kv": free})])
    np.testing.assert_allclose(kept, pool.stage(free).view(np.float32), rtol=1e-4, atol=1e-5)
    bench.cache.release(match)
    end(bench)


def test_what_a_hit_has_brought_is_not_computed_again(monkeypatch):
    bench, ids = drafted("llama", 2), prompt(75)
    bench.ask(ids, 8, ignore_eos=True)
    executor, starts = bench.drafter.drafter._executor, []
    run = executor.run

    def noting(segments):
        starts.extend(segment.start for segment in segments)
        return run(segments)

    monkeypatch.setattr(executor, "run", noting)
    bench.ask(ids, 8, ignore_eos=True)
    assert min(starts) == 72
    end(bench)


def test_an_answer_that_ends_where_a_page_does_leaves_that_page():
    """The last guess was right, and the draft had not run it: it does before the page is shared."""
    bench, ids = drafted("llama", 4), prompt(40)
    whole = ids + bench.ask(ids, 9, ignore_eos=True).tokens
    match = bench.cache.match_prefix(np.array([*whole, 0], np.uint32), bench.namespace)
    assert match.device_tokens == 48
    bench.cache.release(match)
    end(bench)


@pytest.mark.parametrize(("retract", "left"), [(False, 3), (True, 2)])
def test_nothing_is_guessed_from_what_has_not_arrived(retract, left, monkeypatch):
    """A request that gave way resumes at its last token: its pages are still loading when the step is planned."""
    planned = threading.Event()

    class Late(TorchDevicePool):
        def load_layer(self, *args) -> None:
            assert planned.wait(30)
            super().load_layer(*args)

    bench, ids = drafted("llama", 4, pool=Late.page_first), prompt(19)
    run = bench.executor.run

    def arrive_and_run(*args):
        planned.set()
        return run(*args)

    bench.core.preemption._options = replace(OPTIONS, retract=retract)
    asked = bench.add(ids, 30, ignore_eos=True)
    (sequence,) = steps_until(bench, computed=24)
    bench.core.preemption.preempt(sequence)
    while bench.core.transfers_in_flight:
        bench.cache.poll()
    assert bench.cache.evict(Tier.DEVICE) == left
    guessed = len(bench.drafter.guesses)
    monkeypatch.setattr(bench.executor, "run", arrive_and_run)
    bench.core.step()
    assert planned.is_set()
    (sequence,) = bench.core.lineup.running
    assert (sequence.computed, len(bench.drafter.guesses)) == (25, guessed)
    bench.run()
    assert asked.tokens == plain("llama", ids, 30)
    assert counted(bench)[0] == counted(bench)[1]
    end(bench)


def steps_until(bench: Bench, computed: int) -> list[Sequence]:
    """Steps until the first request has computed so many tokens."""
    while not bench.core.lineup.running or bench.core.lineup.running[0].computed < computed:
        bench.core.step()
    assert bench.core.lineup.running[0].computed == computed
    return list(bench.core.lineup.running)


def test_many_draft_at_once_while_prompts_come_in():
    prompts = [prompt(40)[: 20 + 3 * index] + prompt(8, seed=index) for index in range(5)]
    bench = drafted("llama", 3)
    asked = []
    for ids in prompts:
        asked.append(bench.add(ids, 16, ignore_eos=True))
        bench.core.step()
    bench.run()
    assert [one.tokens for one in asked] == [plain("llama", ids, 16) for ids in prompts]
    assert counted(bench)[1] > 0
    end(bench)


def test_requests_that_give_way_draft_on_where_they_resume():
    prompts = [prompt(60, seed=seed) for seed in range(1, 5)]
    bench = drafted("llama", 3, device_pages=30, host_pages=200)
    asked = [bench.add(ids, 90, ignore_eos=True) for ids in prompts]
    bench.run()
    assert bench.core.stats().preemptions > 0
    assert [one.tokens for one in asked] == [plain("llama", ids, 90) for ids in prompts]
    end(bench)


@pytest.mark.parametrize("family", ["mistral", "mamba2", "qwen3_next"])
def test_a_target_of_another_kind_takes_a_draft_with_attention(family, tmp_path):
    """At the slots of a full pool where the target has one, at slots of its own where it has not."""
    draft = write_checkpoint(tmp_path / "draft", vocab_size=256, eos_token_id=255)
    target = replace(open_checkpoint(draft, "float32", PAGE), folder=tmp_path, description=tiny(family)[1])
    backend, ids = MemoryBackend(), prompt(45)
    expected, first = plain(family, ids, 20), []
    made = plan_draft(asked_for(draft, tmp_path), replace(target, folder=draft))
    benches = [
        recorded(Bench(*tiny(family), options=OPTIONS, draft=made, backend=backend)) for backend in (backend, backend)
    ]
    for tier in ("none", "device", "host", "storage"):
        bench = benches[tier == "storage"]
        if tier == "host":
            forget_device(bench)
        answer = bench.ask(ids, 20, ignore_eos=True)
        assert answer.tokens == expected
        assert answer.cached == {"device": 0, "host": 0, "storage": 0} | ({} if tier == "none" else {tier: 40})
        guesses = bench.drafter.take()
        first = first or guesses
        assert guesses == first
    assert len(first) > 10
    for bench in benches:
        bench.settle()
        bench.idle()
    for bench in benches:
        bench.core.close()


class Forgetful(MemoryBackend):
    """Has lost what the draft pool has of every page from `page` on."""

    def __init__(self, page: int) -> None:
        super().__init__()
        self._page = page
        self._numbers: dict[bytes, int] = {}

    def write(self, keys, values):
        for key in keys:
            self._numbers[key.page] = self._numbers.get(key.parent, 0) + 1
        return super().write(keys, values)

    def contains(self, keys):
        there = super().contains(keys)
        lost = [key.pool == "draft" and self._numbers.get(key.page, 0) > self._page for key in keys]
        return there & ~np.array(lost, dtype=np.bool_)


def test_where_the_drafts_part_is_missing_the_hit_is_cut():
    backend, ids = Forgetful(4), prompt(75)
    first = drafted("llama", 2, backend)
    expected = first.ask(ids, 16, ignore_eos=True).tokens
    guesses = first.drafter.take()
    first.settle()
    second = drafted("llama", 2, backend)
    answer = second.ask(ids, 16, ignore_eos=True)
    assert answer.cached == {"device": 0, "host": 0, "storage": 4 * PAGE}
    assert (answer.tokens, second.drafter.take()) == (expected, guesses)
    end(second)
    first.core.close()


def test_pages_are_shared_no_further_than_the_draft_has_come(monkeypatch):
    bench = drafted("llama", 2)
    settle = bench.drafter.drafter.settle
    monkeypatch.setattr(bench.drafter, "settle", lambda leads: settle(leads) if leads[0].computed < 40 else 1 / 0)
    ids = prompt(75)
    expected = bench.ask(ids, 1, ignore_eos=True).tokens
    monkeypatch.setattr(bench.drafter, "settle", settle)
    again = bench.ask(ids, 1, ignore_eos=True)
    assert (again.cached["device"], again.tokens) == (32, expected)
    assert bench.ask(ids, 1, ignore_eos=True).cached["device"] == 72
    end(bench)


def asked_for(draft: object, folder) -> DraftSettings:
    return DraftSettings(str(draft), 4, "float32", PAGE, folder)


@pytest.mark.parametrize("layers", ["0", "4", "-1", "two", ""])
def test_more_layers_than_there_are_is_refused(checkpoint, tmp_path, layers):
    target = open_checkpoint(checkpoint, "float32", PAGE)
    with pytest.raises(ConfigError, match=r"draft=first-layers:.*the model has 3 layers; give first-layers:1"):
        plan_draft(asked_for(f"first-layers:{layers}", tmp_path), target)


def test_first_layers_that_can_not_be_run_alone_are_refused(tmp_path):
    """Inputs of all layers come from one embedding."""
    target = open_checkpoint(write_tiny("gemma4_text", tmp_path / "model"), "float32", PAGE)
    with pytest.raises(ConfigError, match=r"draft=first-layers:5: model type 'gemma4_text' has one embedding"):
        plan_draft(asked_for("first-layers:5", tmp_path), target)
    for layers in ("6", "all"):
        assert plan_draft(asked_for(f"first-layers:{layers}", tmp_path), target).shown.startswith("draft: ")


def test_a_draft_that_can_not_be_one_is_refused_by_name(checkpoint, tmp_path):
    target = open_checkpoint(checkpoint, "float32", PAGE)
    other = write_checkpoint(tmp_path / "other", vocab_size=301)
    with pytest.raises(ConfigError, match=r"draft=.*other: the draft has 301 tokens, the model 300"):
        plan_draft(asked_for(other, tmp_path), target)
    deep = write_checkpoint(tmp_path / "deep", num_hidden_layers=5)
    with pytest.raises(ConfigError, match="the draft has 5 layers, its target 3"):
        plan_draft(asked_for(deep, tmp_path), target).description  # noqa: B018
    with pytest.raises(ConfigError, match=r"draft=.*nowhere: it is neither mtp nor first-layers:N"):
        plan_draft(asked_for(tmp_path / "nowhere", tmp_path), target)
    renamed = write_checkpoint(tmp_path / "renamed")
    words = (renamed / "tokenizer.json").read_text()
    (renamed / "tokenizer.json").write_text(words.replace('"a": ', '"\u00e6\u00e6": '))
    with pytest.raises(ConfigError, match="the draft's tokenizer has other tokens"):
        plan_draft(asked_for(renamed, tmp_path), target)


def test_a_recurrent_draft_is_refused_by_name():
    with pytest.raises(ConfigError, match="pool 'state' keeps snapshots of recurrent state"):
        plan("qwen3_next", 4).description  # noqa: B018


def test_a_shorter_model_shares_the_weights_and_leaves_the_longer_alone():
    module = build_tiny("llama")
    short = CausalModel(module).first_layers(2).module
    assert next(short.parameters()) is next(module.parameters())
    assert len(short.model.layers) == short.config.num_hidden_layers == 2
    assert (len(module.model.layers), module.config.num_hidden_layers) == (4, 4)
    assert describe_model(short.config, PAGE).layer_count == 2


def test_an_engine_drafts_with_what_the_settings_name(checkpoint, cache_folder, tmp_path):
    draft = write_checkpoint(tmp_path / "draft", num_hidden_layers=1)
    namespaces, ids = set(), prompt(50)
    with running(settings(checkpoint, cache_folder)) as engine:
        expected = ask(engine, ids, 20, ignore_eos=True)[0]
        namespaces.add(engine.info.namespace.fingerprint)
    for name, share in (("first-layers:all", 1.0), ("first-layers:1", 0.5), ("first-layers:2", 0.5), (draft, 0.5)):
        with running(settings(checkpoint, cache_folder, draft=str(name), draft_tokens=3)) as engine:
            assert ask(engine, ids, 20, ignore_eos=True)[0] == expected
            stats = engine.call(lambda core: core.stats())
            assert stats.drafted_tokens > 0
            assert stats.accepted_tokens <= share * stats.drafted_tokens
            assert share < 1.0 or stats.accepted_tokens == stats.drafted_tokens
            assert any(line.startswith("draft: ") for line in engine.info.sizes)
            namespaces.add(engine.info.namespace.fingerprint)
    assert len(namespaces) == 5
