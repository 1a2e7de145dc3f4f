"""`hicache simulate`: seeds in numbers, one seed to be looked at, or a machine that is stated; it only prints."""

import argparse
import json
from dataclasses import asdict

from hicache.cli.flags import settings_from
from hicache.cli.simulate_flags import STEPS
from hicache.config import format_size
from hicache.errors import ConfigError
from hicache.simulate.broken import RunError
from hicache.simulate.draw import draw
from hicache.simulate.many import Outcome, run_seeds
from hicache.simulate.plan import plan
from hicache.simulate.report import Report
from hicache.simulate.scenario import Hardware, Workload
from hicache.simulate.shapes import Shape
from hicache.simulate.world import run_scenario

_PLAN_STEPS = 10_000_000
"""More than any workload takes."""


def simulate(arguments: argparse.Namespace) -> int:
    """Runs what was asked for. Status 1: a rule was broken."""
    for name in ("seeds", "steps", "requests"):
        value = vars(arguments)[name]
        if value is not None and value < 1:
            raise ConfigError(f"--{name}={value}: at least 1")
    if arguments.requests is not None:
        return _plan(arguments)
    if arguments.seed is not None:
        return _one(arguments.seed, arguments.steps or STEPS, trace=arguments.trace, as_json=arguments.json)
    if arguments.trace:
        raise ConfigError("--trace: say which seed's events to print, with --seed")
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    return _many(seeds, arguments.steps or STEPS, arguments.json)


def _plan(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    config, serve = settings.cache, settings.serve
    hardware = Hardware(
        step_s=arguments.step_ms / 1e3,
        prefill_tokens_per_s=arguments.prefill_rate,
        host_bytes_per_s=arguments.host_rate,
        storage_bytes_per_s=arguments.storage_rate,
        storage_latency_s=arguments.storage_ms / 1e3,
    )
    workload = Workload(
        gap_s=1 / arguments.rate,
        burst=1,
        prompt_tokens=arguments.prompt_tokens,
        answer_tokens=arguments.answer_tokens,
        documents=arguments.documents,
        aborts=0.0,
        evictions=0.0,
        most_open=1 << 30,
        stop=arguments.requests,
    )
    scenario = plan(
        arguments.seed or 0,
        arguments.steps or _PLAN_STEPS,
        Shape(arguments.shape, arguments.window),
        config,
        hardware,
        workload,
        token_bytes=arguments.token_bytes,
        max_running=serve.max_running,
        chunk_tokens=serve.chunk_tokens,
        retract=serve.preemption == "retract",
        storage=config.storage_url is not None,
    )
    _show(run_scenario(scenario), arguments.json)
    return 0


def _one(seed: int, steps: int, *, trace: bool, as_json: bool) -> int:
    try:
        report = run_scenario(draw(seed, steps), keep=trace)
    except RunError as error:
        for line in error.lines:
            print(line)
        print(_again(str(error), seed, steps))
        return 1
    for line in report.lines:
        print(line)
    _show(report, as_json)
    return 0


def _many(seeds: range, steps: int, as_json: bool) -> int:
    broken = []
    totals = {"seeds": len(seeds), "steps": 0, "requests": 0, "retractions": 0, "void_steps": 0, "faults": 0, "lost": 0}
    for outcome in run_seeds(seeds, steps):
        if outcome.report is None:
            broken.append(outcome)
            if not as_json:
                print(_again(outcome.failure or "", outcome.seed, steps), flush=True)
            continue
        report = outcome.report
        totals["requests"] += sum(report.requests.values())
        totals["steps"] += report.steps
        totals["retractions"] += report.retractions
        totals["void_steps"] += report.void_steps
        totals["faults"] += report.faults
        totals["lost"] += report.lost
        if not as_json:
            print(f"seed {outcome.seed}: {report.digest}", flush=True)
    print(_summary(totals, broken, steps, as_json))
    return 1 if broken else 0


def _summary(totals: dict[str, int], broken: list[Outcome], steps: int, as_json: bool) -> str:
    if as_json:
        failures = [
            {"seed": one.seed, "step": one.step, "rule": one.rule, "digest": one.digest, "failure": one.failure}
            for one in broken
        ]
        return json.dumps({**totals, "steps_per_seed": steps, "broken": failures})
    counts = ", ".join(f"{name} {count}" for name, count in totals.items())
    return f"{counts}; broken: {[one.seed for one in broken] or 'none'}"


def _again(failure: str, seed: int, steps: int) -> str:
    return f"{failure}\n  to see it again: hicache simulate --seed {seed} --steps {steps} --trace"


def _show(report: Report, as_json: bool) -> None:
    values = {name: value for name, value in asdict(report).items() if name != "lines"}
    if as_json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        print(f"{name}: {_readable(name, value)}")


def _readable(name: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_readable(name, one)}" for key, one in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    return format_size(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
