"""Whatever an engine does for want of memory, its answers stay the same; the report shows what it did."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hicache.bench import pressure
from hicache.bench.pressure.measure import Run, measure
from hicache.bench.pressure.plan import COPIES, ENOUGH, SETTINGS, Load
from hicache.bench.pressure.results import Result, summarize, table
from hicache.bench.pressure.subjects import Subject, hybrid
from hicache.cache import CacheStats
from hicache.cli.main import main
from hicache.controller.counters import Counters
from hicache.engine.engine import EngineStats
from hicache.engine.work import CoreStats
from hicache.pools import GroupCounts, PoolCounts
from hicache.testing.families import write_tiny
from hicache.units import Tier

LITTLE = Load(
    jobs=4,
    shortest=20,
    longest=32,
    answer=5,
    bursts=2,
    every=4,
    contexts=2,
    context=16,
    askers=2,
    question=6,
    reply=2,
    rounds=1,
    page_size=4,
    chunk_tokens=32,
)
CARRIED = {"kv": ("draft",), "state": ()}


def test_who_is_kept_on_the_host_is_computed_once_where_others_lose_their_pages(tmp_path: Path):
    load = replace(
        LITTLE, jobs=6, shortest=60, longest=80, answer=6, bursts=4, every=6, askers=3, context=40, question=16
    )
    llama = Subject("llama, random", write_tiny("llama", tmp_path / "llama"), None, load, 1, tmp_path)
    result = pressure.compare(llama)
    assert result.failures == (), table(result)
    rows = {row.setting.name: row.numbers for row in result.rows}
    assert rows["enough"]["recomputed_tokens"] == rows["enough"]["preemptions"] == 0
    assert rows["backup"]["retractions"] > 0
    assert rows["recompute"]["preemptions"] > 0
    assert rows["recompute"]["retractions"] == rows["copies"]["retractions"] == rows["drop"]["retractions"] == 0
    assert rows["drop"]["recomputed_tokens"] > rows["backup"]["recomputed_tokens"]
    assert rows["recompute"]["recomputed_tokens"] > rows["backup"]["recomputed_tokens"], table(result)
    assert rows["drop"]["load_bytes"] == 0
    assert rows["backup"]["load_bytes"] > 0
    assert rows["spill"]["retractions_to_storage"] > 0
    assert rows["spill"]["fetched_bytes"] > 0
    assert set(result.ratios) == {"recompute", "copies", "drop", "enough"}


def test_a_hybrid_that_speculates_answers_the_same_and_every_pool_gives_way(tmp_path: Path):
    load = replace(LITTLE, shortest=40, longest=48, answer=6, every=8, context=32, askers=1, reply=3)
    subject = hybrid(tmp_path, load, 1, 1)
    enough, copies = (measure(subject, one) for one in SETTINGS if one.name in (ENOUGH, COPIES))
    assert copies.answers == enough.answers
    assert min(enough.stats.core.drafted_tokens, copies.stats.core.drafted_tokens) > 0
    assert subject.carried() == CARRIED
    counted = {(one.pool, one.tier): one for one in copies.stats.cache.group.pools}
    assert all(counted[pool, tier].reclaims for pool in CARRIED for tier in (Tier.DEVICE, Tier.HOST))
    assert all(counted[pool, Tier.DEVICE].rollbacks for pool in CARRIED)
    assert not any(counted[pool, Tier.HOST].rollbacks for pool in CARRIED)


@pytest.mark.full
def test_the_short_form_passes(tmp_path: Path):
    found = [pressure.compare(subject) for subject in pressure.short_subjects(tmp_path)]
    assert [result.failures for result in found] == [(), ()], "\n".join(table(result) for result in found)
    assert [result.carried for result in found] == [CARRIED, {"state": (), "draft": ()}]


def made_run(index: int, answer: int = 1, wall_s: float = 1.0, rollbacks: int = 1) -> Run:
    """A run in the setting of that index that went well."""
    counts = [PoolCounts(pool, tier, 1, 2, 3, rollbacks) for pool in CARRIED for tier in (Tier.DEVICE, Tier.HOST)]
    cache = CacheStats((), 0, {}, 0, 0, 0, Counters().snapshot(), None, group=GroupCounts(tuple(counts), 4, 5))
    core = CoreStats(prefill_tokens=70, decode_tokens=40)
    return Run(SETTINGS[index], ((answer,),), wall_s, 2 * wall_s, EngineStats(core, cache), 100)


def summary(*rounds: list[Run]) -> Result:
    return summarize("made", LITTLE, CARRIED, rounds, all_counts=True)


def all_settings(**changes: Any) -> list[Run]:
    return [made_run(index, **changes) for index in range(len(SETTINGS))]


def test_ratios_are_taken_within_a_round():
    slow = [replace(run, wall_s=10.0) for run in all_settings()]
    fast = all_settings()
    for runs, scale in ((slow, 10.0), (fast, 1.0)):
        runs[2] = replace(runs[2], wall_s=1.5 * scale)
    found = summary(slow, fast)
    assert found.ratios["recompute"] == 1.5
    assert found.cpu_ratios["recompute"] == 1.0
    assert found.rows[1].numbers["wall_s"] == 5.5
    assert found.rows[1].numbers["recomputed_tokens"] == 10


def test_another_answer_is_a_failure():
    runs = all_settings()
    runs[4] = made_run(4, answer=2)
    found = summary(all_settings(), runs)
    assert found.failures == ("drop: other outputs than with enough memory",)
    assert [row.identical for row in found.rows] == [True, True, True, True, False, True]
    assert "DIFFERENT" in table(found)


def test_a_pool_that_never_gave_way_is_a_failure():
    found = summary(all_settings(rollbacks=0))
    assert found.failures == tuple(f"pool {pool!r}: no reservation was undone because of it" for pool in CARRIED)
    assert replace(found, all_counts=False).failures == ()
    bare = replace(
        found, rows=tuple(replace(row, pools={place: PoolCounts(*place) for place in row.pools}) for row in found.rows)
    )
    assert "pool 'state': never told to evict in tier host" in bare.failures


def test_pools_are_added_up_over_rounds_and_settings():
    found = summary(all_settings(), all_settings())
    assert found.totals()[0] == PoolCounts("kv", Tier.DEVICE, 12, 24, 36, 12)
    assert found.rows[0].pools["kv", Tier.DEVICE] == PoolCounts("kv", Tier.DEVICE, 2, 4, 6, 2)


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_prints_one_report(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    subject = Subject("made", tmp_path, None, LITTLE, 1, tmp_path)
    monkeypatch.setattr(pressure, "short_subjects", lambda folder: [subject])
    monkeypatch.setattr(pressure, "compare", lambda one: summary(all_settings()))
    assert main(["bench", "pressure", "--short", *(["--json"] if as_json else [])]) == 0
    printed = capsys.readouterr().out
    if not as_json:
        assert "kv+draft" in printed
        return
    report = json.loads(printed)
    assert set(report) == {"passed", "threads", "models"}
    (model,) = report["models"]
    assert [row["setting"] for row in model["settings"]] == [setting.name for setting in SETTINGS]
    assert model["pools"][0]["with"] == ["draft"]
    assert report["passed"] and model["outputs_identical"]


def test_the_command_fails_when_something_did(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    subject = Subject("made", tmp_path, None, LITTLE, 1, tmp_path)
    monkeypatch.setattr(pressure, "short_subjects", lambda folder: [subject])
    monkeypatch.setattr(pressure, "compare", lambda one: summary(all_settings(rollbacks=0)))
    assert main(["bench", "pressure", "--short"]) == 1


def test_the_command_hands_over_what_was_asked(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[bool, bool]] = []

    def run(short: bool, as_json: bool) -> int:
        calls.append((short, as_json))
        return 0

    module: Any = ModuleType("hicache.bench.pressure")
    module.run = run
    monkeypatch.setitem(__import__("sys").modules, "hicache.bench.pressure", module)
    assert main(["bench", "pressure", "--short", "--json"]) == main(["bench", "pressure"]) == 0
    assert calls == [(True, True), (False, False)]
