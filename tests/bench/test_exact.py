"""Every family passes in the short form; each kind of fault is found, and by the check that is meant for it."""

import json
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from hicache.bench import exact
from hicache.bench.exact import families, plan, refused, results, rig
from hicache.builder import build_kv_cache
from hicache.cache import Match
from hicache.cli.main import main
from hicache.controller.reclaim import Reclaimer
from hicache.coverage import Window
from hicache.device.torch import TorchDevicePool
from hicache.engine.executor import Executor
from hicache.engine.sequence import Sequence
from hicache.engine.token_pools import Sight
from hicache.testing.families import TINY
from hicache.tree import RadixTree, TreeMatch
from hicache.units import DeviceSlots, Tier

TINIEST = replace(plan.SHORT, hits=(4, 12, 20), chunkings=((5, 3),), chunked=16, prompt=29, answer=4)
COLUMNS = ("bytes", "hits", "tokens", "chunks", "sidecars", "talk", "retraction")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", TINY)
def test_every_family_is_exact(family: str):
    row = families.measure(family, plan.SHORT)
    assert row.passed, results.table(exact.Report((row,), ()))
    assert tuple(check.name for check in row.checks) == COLUMNS
    assert [check.name for check in row.checks if check.passed is None] in ([], ["sidecars"])


@pytest.mark.parametrize("family", exact.REFUSALS)
def test_what_cannot_be_exact_is_refused_by_name(family: str):
    refusal = refused.measure_refusal(family)
    assert refusal.passed
    assert refusal.text.startswith(f"model type {family!r} ")


def found(family: str) -> set[str]:
    """The checks that fail, with little tried."""
    row = families.measure(family, TINIEST)
    failed = {check.name for check in row.checks if check.passed is False}
    assert all(check.failures for check in row.checks if check.passed is False)
    return failed


def test_without_a_fault_little_is_enough():
    assert found("bamba") == set()
    assert found("gemma3_text") == set()


@pytest.mark.parametrize(
    ("family", "lossy"), [("llama", "kv"), ("gemma3_text", "swa"), ("deepseek_v32", "indexer"), ("bamba", "state")]
)
def test_a_byte_of_one_pool_that_is_lost_on_load(family: str, lossy: str, monkeypatch: pytest.MonkeyPatch):
    class Lossy(TorchDevicePool):
        def load_layer(self, slots, pages, rows, layer) -> None:
            super().load_layer(slots, pages, rows, layer)
            if self.name == lossy and layer == 0:
                self.tensor(0, 0).view(torch.uint8)[slots[-1], ..., -4] ^= 1

    monkeypatch.setattr(rig, "TorchDevicePool", Lossy)
    row = families.measure(family, TINIEST)
    assert row.check("bytes").passed is False
    assert all(f"{lossy} after a hit of" in text for text in row.check("bytes").failures)


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_layer_mapper_that_is_off_by_one(family: str, monkeypatch: pytest.MonkeyPatch):
    """All bytes come, but some later than the layer that reads them; loads are slow, so that it shows."""
    build = build_kv_cache

    def build_wrongly(description, *arguments, **options):
        pools = tuple(replace(pool, layers=pool.layers[1:] + pool.layers[:1]) for pool in description.pools)
        return build(replace(description, pools=pools), *arguments, **options)

    class Slow(TorchDevicePool):
        def load_layer(self, *arguments) -> None:
            time.sleep(0.02)
            super().load_layer(*arguments)

    monkeypatch.setattr(rig, "build_kv_cache", build_wrongly)
    monkeypatch.setattr(rig, "TorchDevicePool", Slow)
    failed = found(family)
    assert "hits" in failed
    assert "bytes" not in failed


def test_state_that_is_not_kept_in_its_snapshot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Executor, "copy_state", lambda *_: None)
    failed = found("bamba")
    assert {"hits", "tokens", "sidecars", "talk"} <= failed
    assert "chunks" not in failed


def test_a_window_that_is_too_wide(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Sight, "visible", lambda self, rows, keys: keys <= rows[:, None])
    assert {"chunks", "tokens", "talk"} <= found("mistral")


def test_coverage_that_asks_for_too_few_pages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Window, "pages", lambda self, page_size: 1)
    assert {"bytes", "hits"} <= found("gemma3_text")


def test_an_eviction_that_takes_of_another_pool(monkeypatch: pytest.MonkeyPatch):
    evict = Reclaimer.evict_host

    def evict_too_much(self: Reclaimer, pool: str, count: int) -> None:
        evict(self, pool, count)
        anchor = self._state.pools[0]
        if pool != anchor:
            evict(self, anchor, self._state.available(anchor, Tier.HOST) + 1)

    monkeypatch.setattr(Reclaimer, "evict_host", evict_too_much)
    assert found("bamba") == {"sidecars"}


def test_a_hit_that_forgets_one_pool(monkeypatch: pytest.MonkeyPatch):
    match = RadixTree.match

    def match_all(self: RadixTree, *arguments):
        whole = match(self, *arguments)
        return TreeMatch(whole.namespace, whole.path, whole.pages, whole.device_pages, whole.pages)

    monkeypatch.setattr(RadixTree, "match", match_all)
    assert "sidecars" in found("bamba")


def test_a_request_that_gives_nothing_back(monkeypatch: pytest.MonkeyPatch):
    release = Sequence.release

    def keep_the_last(self: Sequence) -> None:
        if self.request.answer_tokens == 0 or self.request.length < 40:
            release(self)

    monkeypatch.setattr(Sequence, "release", keep_the_last)
    assert "talk" in found("llama")


@pytest.mark.parametrize(
    ("family", "pool", "partial"), [("bamba", "state", False), ("llama", "kv", True), ("gemma3_text", "swa", True)]
)
def test_a_retracted_request_that_comes_back_without_its_newest_slot(
    family: str, pool: str, partial: bool, monkeypatch: pytest.MonkeyPatch
):
    """The live state, or the page that is not full yet."""
    arrive = Match.parcel_arrived

    def lose_the_newest(self: Match, *, good: bool) -> None:
        arrive(self, good=good)
        newest = self.slots(pool)[-1] if partial else self.live_slots.get(pool)
        if newest is not None:
            device = self._state.group.get_entry(pool).device_pool
            assert isinstance(device, TorchDevicePool)
            device.zero(DeviceSlots(np.array([newest], np.int32)))

    monkeypatch.setattr(Match, "parcel_arrived", lose_the_newest)
    assert found(family) == {"retraction"}


def test_retraction_that_did_not_go_through_storage(monkeypatch: pytest.MonkeyPatch):
    take = rig.Rig.take
    monkeypatch.setattr(rig.Rig, "take", lambda self, tier, *leave: take(self, tier) if tier is Tier.DEVICE else {})
    row = families.measure("llama", TINIEST)
    assert {check.name for check in row.checks if check.passed is False} == {"retraction"}
    assert row.check("retraction").failures == ("nothing went through storage",)


# What is printed

PASSED = results.Check.judged("bytes", "1,234", [], compared_bytes=1234)
FAILED = results.Check.judged("hits", "0 of 3", ["a hit of 4 tokens from host: logits differ by 1.0e-03"], equal=0)
ROW = exact.Row("tiny", (results.PoolBytes("kv", 4096, 4), results.PoolBytes("state", 999, 0)), (PASSED, FAILED), 1.0)
REFUSAL = exact.Refusal("mamba", True, "model type 'mamba' is Mamba-1", "1.0e-02")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(report: exact.Report) -> None:
        monkeypatch.setattr(exact, "report", lambda names, short: report)

    return put


def test_the_table_names_pools_sizes_and_failures(measured, capsys: pytest.CaptureFixture[str]):
    measured(exact.Report((ROW,), (REFUSAL,)))
    assert main(["bench", "exact"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["family", "pools", "B/token", "B/state", "bytes", "hits"]
    assert lines[1].split() == ["tiny", "kv", "state", "1,024", "999", "ok", "1,234", "FAIL", "0", "of", "3"]
    assert lines[2] == "tiny, hits: a hit of 4 tokens from host: logits differ by 1.0e-03"
    assert lines[4:] == ["not run:", "mamba: model type 'mamba' is Mamba-1", "    ok 1.0e-02"]


def test_json_is_all_there_is_on_stdout(measured, capsys: pytest.CaptureFixture[str]):
    measured(exact.Report((replace(ROW, checks=(PASSED,)),), (REFUSAL,)))
    assert main(["bench", "exact", "--json", "--short"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["rows"][0]["pools"] == [
        {"pool": "kv", "bytes_per_token": 1024},
        {"pool": "state", "bytes_per_state": 999},
    ]
    assert found["rows"][0]["checks"]["bytes"] == {"passed": True, "compared_bytes": 1234, "failures": []}
    assert found["refusals"][0]["family"] == "mamba"


@pytest.mark.parametrize("report", [exact.Report((ROW,), ()), exact.Report((), (replace(REFUSAL, passed=False),))])
def test_a_failure_is_the_exit_status(report: exact.Report, measured):
    measured(report)
    assert exact.run([], short=True, as_json=True) == 1


def test_families_are_found_by_their_names():
    assert exact.find_families(["llama", "gemma3", "mamba"]) == ("llama", "gemma3_text", "mamba")
    assert set(exact.find_families([])) == {*TINY, *exact.REFUSALS}


def test_a_family_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "exact", "--families", "llama, bert"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hicache: --families: there is no family 'bert'; there are: llama, ")


def test_a_check_that_raises_is_a_failure_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(families, "check_chunks", fail)
    row = families.measure("llama", TINIEST)
    assert [check.name for check in row.checks if not check.passed and check.passed is not None] == ["chunks"]
    assert row.check("chunks").failures == ("ValueError: no such thing",)


def test_cuts_of_a_chunking():
    tried = replace(plan.SHORT, chunked=9)
    assert list(tried.cuts(())) == [*range(1, 10)]
    assert list(tried.cuts((4, 2))) == [4, 6, 7, 8, 9]
    assert list(tried.cuts((4, 2, 0))) == [4, 6, 9]
    assert np.all(np.diff(list(plan.FULL.cuts(plan.FULL.chunkings[-1]))) > 0)
