"""`hicache bench pressure`: what a server does with more requests than memory, and that no answer changes by it."""

import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hicache.bench.pressure.measure import Run, measure
from hicache.bench.pressure.plan import SETTINGS, Load
from hicache.bench.pressure.results import Result, summarize, table
from hicache.bench.pressure.subjects import Subject, hybrid, real_model, recurrent

__all__ = ["compare", "run", "short_subjects"]

_REAL = Load(
    jobs=6,
    shortest=300,
    longest=600,
    answer=16,
    bursts=4,
    every=16,
    contexts=2,
    context=384,
    askers=3,
    question=60,
    reply=4,
    rounds=2,
    page_size=16,
    chunk_tokens=512,
)
_RANDOM = Load(
    jobs=6,
    shortest=100,
    longest=200,
    answer=8,
    bursts=4,
    every=8,
    contexts=2,
    context=128,
    askers=3,
    question=20,
    reply=3,
    rounds=2,
    page_size=8,
    chunk_tokens=128,
)
_SHORT = Load(
    jobs=6,
    shortest=24,
    longest=48,
    answer=8,
    bursts=3,
    every=8,
    contexts=2,
    context=32,
    askers=2,
    question=6,
    reply=3,
    rounds=1,
    page_size=4,
    chunk_tokens=32,
)


def run(short: bool, as_json: bool) -> int:
    """Print a table per model, or with `as_json` one JSON object and nothing else on stdout. 1 if anything failed.

    `short`: tiny models only, and few requests.
    """
    logging.basicConfig(format="hicache: %(message)s", stream=sys.stderr)
    library: Any = transformers_logging
    library.set_verbosity_error()
    results = []
    with tempfile.TemporaryDirectory(prefix="hicache-pressure-") as folder:
        for subject in short_subjects(Path(folder)) if short else _subjects(Path(folder)):
            results.append(compare(subject))
            if not as_json:
                print(table(results[-1]), end="\n\n", flush=True)
    passed = not any(result.failures for result in results)
    if as_json:
        report = {
            "passed": passed,
            "threads": torch.get_num_threads(),
            "models": [result.to_json() for result in results],
        }
        print(json.dumps(report))
    return 0 if passed else 1


def compare(subject: Subject) -> Result:
    """All settings in turn, round after round."""
    rounds: list[list[Run]] = []
    for number in range(subject.load.rounds):
        rounds.append([])
        for setting in SETTINGS:
            print(f"hicache: {subject.name}, round {number + 1}, {setting.name}...", file=sys.stderr, flush=True)
            rounds[-1].append(measure(subject, setting))
    return summarize(subject.name, subject.load, subject.carried(), rounds, all_counts=subject.draft is not None)


def short_subjects(folder: Path) -> Iterator[Subject]:
    """Tiny models, in one thread."""
    yield hybrid(folder, _SHORT, 1, 1)
    yield recurrent(folder, _SHORT, 1, 1)


def _subjects(folder: Path) -> Iterator[Subject]:
    yield real_model(_REAL)
    yield hybrid(folder, _RANDOM, None, 2)
    yield recurrent(folder, _RANDOM, None, 2)
