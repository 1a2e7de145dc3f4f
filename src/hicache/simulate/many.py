"""Many seeds on all cores; what a seed does depends on nothing but the seed."""

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

from hicache.simulate.broken import RunError
from hicache.simulate.draw import draw
from hicache.simulate.report import Report
from hicache.simulate.world import run_scenario

_CHUNK = 8
"""Seeds that a process takes at a time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one seed: a report; or what broke, by which rule, in which step, and the digest up to there."""

    seed: int
    report: Report | None = None
    failure: str | None = None
    rule: str | None = None
    step: int | None = None
    digest: str | None = None


def run_seed(seed: int, steps: int) -> Outcome:
    """One seed. Failed transfers are expected: nothing is logged meanwhile."""
    with _silence():
        try:
            return Outcome(seed, run_scenario(draw(seed, steps)))
        except RunError as error:
            return Outcome(seed, failure=str(error), rule=error.rule, step=error.step, digest=error.digest)


@contextmanager
def _silence() -> Iterator[None]:
    log = logging.getLogger("hicache")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def run_seeds(seeds: Sequence[int], steps: int, processes: int | None = None) -> Iterator[Outcome]:
    """All seeds, in order, as they end. `processes`: None takes every core there is."""
    count = min(len(seeds), processes or len(os.sched_getaffinity(0)))
    if count <= 1:
        yield from (run_seed(seed, steps) for seed in seeds)
        return
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        yield from pool.map(run_seed, seeds, [steps] * len(seeds), chunksize=min(_CHUNK, -(-len(seeds) // count)))
