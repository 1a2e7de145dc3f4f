"""`hicache simulate` prints what it ran; its status says whether a rule was broken."""

import json

import pytest

from hicache.cli.main import main
from tests.simulate.planted import mixes_tenants


def test_seeds_are_summed_up(capsys):
    assert main(["simulate", "--seeds", "1", "--first-seed", "3", "--steps", "30", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seeds"] == 1 and told["steps_per_seed"] == 30 and told["requests"] > 0 and told["broken"] == []


def test_each_seed_has_a_digest_that_the_seed_alone_gives_again(capsys):
    assert main(["simulate", "--seeds", "1", "--first-seed", "3", "--steps", "30"]) == 0
    digest = capsys.readouterr().out.splitlines()[0].removeprefix("seed 3: ")
    assert main(["simulate", "--seed", "3", "--steps", "30", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == digest


def test_a_trace_shows_every_event(capsys):
    assert main(["simulate", "--seed", "3", "--steps", "30", "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("request 0 of" in line for line in lines) and any("compute" in line for line in lines)
    assert f"events: {lines.index('seed: 3')}" in lines


def test_a_broken_rule_is_named_with_the_command_that_shows_it_again(capsys, monkeypatch):
    mixes_tenants(monkeypatch)
    seed = next(seed for seed in range(200) if main(["simulate", "--seed", str(seed), "--steps", "60"]))
    told = capsys.readouterr().out
    assert f"hicache simulate --seed {seed} --steps 60 --trace" in told and "tenant" in told
    assert main(["simulate", "--seeds", "1", "--first-seed", str(seed), "--steps", "60", "--json"]) == 1
    (broken,) = json.loads(capsys.readouterr().out)["broken"]
    assert broken["seed"] == seed and broken["rule"] == "tenants"


def test_a_machine_of_ones_own(capsys):
    flags = ["--requests", "5", "--device-size", "2GiB", "--host-size", "2GiB", "--prompt-tokens", "300"]
    assert main(["simulate", *flags, "--answer-tokens", "4", "--eviction-policy", "lfu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == {"length": 5}


@pytest.mark.parametrize(
    ("flags", "said"), [(["--seeds", "0"], "--seeds=0"), (["--trace"], "--seed"), (["--steps", "-1"], "--steps=-1")]
)
def test_what_makes_no_sense_is_refused(flags, said, capsys):
    assert main(["simulate", *flags]) == 2
    assert said in capsys.readouterr().err
