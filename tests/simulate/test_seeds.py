"""Whatever a seed decides, every answer is right, nobody hangs, and every slot is accounted for at the end."""

import json
import os
import subprocess
import sys

import pytest

from hicache.simulate.draw import draw
from hicache.simulate.many import Outcome, run_seed, run_seeds

STEPS = 300
PER_TEST = 10
FULL = [pytest.param(first, marks=pytest.mark.full) for first in range(200, 1100, PER_TEST)]


@pytest.mark.parametrize("first", [*range(0, 100, PER_TEST), *FULL])
def test_nothing_breaks(first):
    nothing_breaks(first)


def nothing_breaks(first: int) -> None:
    """`PER_TEST` seeds from `first` on."""
    outcomes = list(run_seeds(range(first, first + PER_TEST), STEPS, processes=1))
    assert [outcome.failure for outcome in outcomes if outcome.failure] == []
    assert all(sum(outcome.report.requests.values()) for outcome in outcomes)


def test_equal_seeds_run_equally_in_every_process():
    here = [run_seed(seed, 60).report for seed in (1, 4)]
    assert here[0] is not None and here[1] is not None and here[0].digest != here[1].digest
    script = (
        "import json; from dataclasses import asdict; from hicache.simulate.many import run_seed;"
        " print(json.dumps([asdict(run_seed(seed, 60).report) for seed in (1, 4)]))"
    )
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        there = json.loads(done.stdout)
        assert [one["digest"] for one in there] == [one.digest for one in here]
        assert [one["events"] for one in there] == [one.events for one in here]


def test_several_processes_give_what_one_gives():
    alone, together = (list(run_seeds(range(4), 40, processes)) for processes in (1, 2))
    assert alone == together


def test_seeds_draw_every_kind_of_trouble():
    drawn = [draw(seed, STEPS) for seed in range(200)]
    assert {one.shape.kind for one in drawn} == {
        "full", "window", "state", "latent", "full+window", "full+state", "all"
    }  # fmt: skip
    assert {one.shape.draft for one in drawn} == {"none", "packed", "sidecar"}
    assert {one.options.retract for one in drawn} == {one.shutdown for one in drawn} == {True, False}
    assert any(one.faults.lose for one in drawn) and any(one.faults.storage for one in drawn)
    assert any(one.storage.attach for one in drawn) and any(one.storage.detach for one in drawn)
    assert len({one.options.priority_ageing_s / one.hardware.step_s for one in drawn if one.workload.urgent}) >= 4
    assert any(one.workload.salts == 0 for one in drawn) and any(one.workload.aborts for one in drawn)
    assert len({(one.settings["eviction_policy"], one.settings["write_policy"]) for one in drawn}) > 15


def test_an_outcome_is_a_report_or_a_failure():
    outcome = run_seed(2, 20)
    assert isinstance(outcome, Outcome)
    assert outcome.report is not None and outcome.failure is None
