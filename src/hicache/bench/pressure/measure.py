"""One engine per run, as `hicache serve` starts it, threads and all; how far jobs are decides when others come."""

import asyncio
import time
from contextlib import closing
from dataclasses import dataclass

from hicache.bench.pressure.plan import Load, Setting
from hicache.bench.pressure.subjects import Subject
from hicache.engine.core import EngineCore
from hicache.engine.engine import Engine, EngineStats
from hicache.engine.launch import create_engine
from hicache.engine.stream import Stream
from hicache.engine.types import MOST_PRIORITY, SamplingParams
from hicache.errors import CacheError

Answers = tuple[tuple[int, ...], ...]


class FailedError(CacheError):
    """A request of the benchmark did not end as it should."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of all requests in one setting: their answers, seconds by the clock and of all cores, and counts.

    `least_tokens`: what must be computed when nothing is computed twice.
    """

    setting: Setting
    answers: Answers
    wall_s: float
    cpu_s: float
    stats: EngineStats
    least_tokens: int


def measure(subject: Subject, setting: Setting) -> Run:
    """Starts an engine, has it answer everything, and closes it; times are those between first and last token asked."""
    load = subject.load
    _, vocabulary = subject.describe()
    prompts = load.job_prompts(vocabulary)
    bursts = list(load.burst_prompts(vocabulary))
    with closing(create_engine(subject.settings(setting))) as engine:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        answers = asyncio.run(_Client(engine, load).ask(prompts, bursts))
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        stats = engine.call(_stats)
    return Run(setting, answers, wall_s, cpu_s, stats, load.least_tokens(prompts))


class _Client:
    """Asks everything of one engine. `_got` counts the tokens of the jobs' answers so far."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self._engine = engine
        self._load = load
        self._got = 0
        self._more = asyncio.Condition()

    async def ask(self, prompts: list[list[int]], bursts: list[list[list[int]]]) -> Answers:
        """The answers to the jobs, then those to the bursts."""
        jobs = [self._submit(prompt, self._load.answer, 0) for prompt in prompts]
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(self._follow(job)) for job in jobs]
            replies = group.create_task(self._ask_bursts(bursts))
        return (*(answer.result() for answer in answers), *replies.result())

    async def _ask_bursts(self, bursts: list[list[list[int]]]) -> list[tuple[int, ...]]:
        replies: list[tuple[int, ...]] = []
        for number, questions in enumerate(bursts):
            await self._wait_for((number + 1) * self._load.every)
            streams = [self._submit(question, self._load.reply, MOST_PRIORITY) for question in questions]
            replies += await asyncio.gather(*(_collect(stream) for stream in streams))
        return replies

    async def _wait_for(self, tokens: int) -> None:
        async with self._more:
            await self._more.wait_for(lambda: self._got >= tokens)

    async def _follow(self, stream: Stream) -> tuple[int, ...]:
        tokens: list[int] = []
        async for chunk in stream:
            _require_good(chunk.error)
            tokens += chunk.token_ids
            async with self._more:
                self._got += len(chunk.token_ids)
                self._more.notify_all()
        return tuple(tokens)

    def _submit(self, prompt: list[int], tokens: int, priority: int) -> Stream:
        return self._engine.submit(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), priority=priority)


async def _collect(stream: Stream) -> tuple[int, ...]:
    chunks = [chunk async for chunk in stream]
    _require_good(chunks[-1].error)
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def _require_good(error: str | None) -> None:
    if error is not None:
        raise FailedError(f"a request has failed: {error}")


def _stats(core: EngineCore) -> EngineStats:
    core.cache.audit()
    return EngineStats(core.stats(), core.cache.stats())
