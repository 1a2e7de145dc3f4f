"""One engine per run, as `hicache serve` starts it, with threads for its transfers; all requests come at once."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from hicache.bench.pressure.plan import Setting
from hicache.bench.pressure.subjects import Subject
from hicache.engine.core import EngineCore
from hicache.engine.engine import Engine, EngineStats
from hicache.engine.launch import create_engine
from hicache.engine.stream import Stream
from hicache.engine.types import SamplingParams
from hicache.errors import CacheError


class FailedError(CacheError):
    """A request of the benchmark did not end as it should."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of all requests in one setting: their answers, seconds by the clock and of all cores, and counts.

    `least_tokens`: what must be computed when nothing is computed twice.
    """

    setting: Setting
    answers: tuple[tuple[int, ...], ...]
    wall_s: float
    cpu_s: float
    stats: EngineStats
    least_tokens: int


def measure(subject: Subject, setting: Setting) -> Run:
    """Starts an engine, has it answer everything, and closes it; times are those between first and last token asked."""
    _, vocabulary = subject.describe()
    prompts = list(subject.load.prompts(vocabulary))
    with closing(create_engine(subject.settings(setting))) as engine:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        answers = _ask(engine, prompts, subject.load.answer)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        stats = engine.call(_stats)
    least_tokens = sum(len(prompt) + subject.load.answer - 1 for prompt in prompts)
    return Run(setting, answers, wall_s, cpu_s, stats, least_tokens)


def _ask(engine: Engine, prompts: Sequence[Sequence[int]], answer: int) -> tuple[tuple[int, ...], ...]:
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    streams = [engine.submit(prompt, params) for prompt in prompts]
    return tuple(_collect(stream) for stream in streams)


def _collect(stream: Stream) -> tuple[int, ...]:
    chunks = list(stream)
    if chunks[-1].error is not None:
        raise FailedError(f"a request has failed: {chunks[-1].error}")
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def _stats(core: EngineCore) -> EngineStats:
    core.cache.audit()
    return EngineStats(core.stats(), core.cache.stats())
