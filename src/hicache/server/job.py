"""The engine's streams of one HTTP request: started together, and aborted together when the client is gone."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request

from hicache.engine.types import Ask, Chunk, Usage
from hicache.errors import CapacityError, ClosedError, ConfigError, QueueFullError
from hicache.server.engine_like import EngineLike, StreamLike
from hicache.server.errors import engine_failed, from_cache_error, stopping
from hicache.server.metrics import ServerMetrics
from hicache.server.tenants import ANYONE, Tenant

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Submission:
    """One prompt as the engine takes it; `param` is the request's field it came from."""

    ask: Ask
    param: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    text: str
    finish_reason: str
    usage: Usage


class Job:
    """Runs `submissions` at once, all or none. Every chunk goes through `events`, which counts what it sees."""

    def __init__(
        self, engine: EngineLike, metrics: ServerMetrics, submissions: Sequence[Submission], tenant: Tenant = ANYONE
    ) -> None:
        self._metrics = metrics
        self._tenant = tenant
        self._streams = _submit(engine, submissions)

    def abort(self) -> None:
        """Stop what still runs. Harmless afterwards and more than once."""
        for stream in self._streams:
            stream.abort()

    async def answers(self) -> list[Answer]:
        """All answers, in the order of the submissions."""
        texts = [""] * len(self._streams)
        answers: dict[int, Answer] = {}
        async with aclosing(self.events()) as events:
            async for index, chunk in events:
                texts[index] += chunk.text
                if chunk.finish_reason is not None and chunk.usage is not None:
                    answers[index] = Answer(texts[index], chunk.finish_reason, chunk.usage)
        if len(answers) < len(texts):
            raise engine_failed("the engine ended without an answer")
        return [answers[index] for index in range(len(texts))]

    async def events(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Chunks of all streams as they come, with the index of their submission; ApiError when the engine fails."""
        queue: asyncio.Queue[tuple[int, Chunk] | None] = asyncio.Queue()
        pumps = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(self._streams)]
        running = len(pumps)
        try:
            while running:
                event = await queue.get()
                if event is None:
                    running -= 1
                    continue
                self._observe(event[1])
                yield event
            for pump in pumps:
                await pump
        finally:
            for pump in pumps:
                pump.cancel()
            self.abort()

    def _observe(self, chunk: Chunk) -> None:
        if chunk.ttft_s is not None:
            self._metrics.first_token(chunk.ttft_s)
        if chunk.finish_reason == "error":
            raise engine_failed(chunk.error or "the engine failed on this request")
        if chunk.finish_reason == "abort":
            raise stopping()
        if chunk.usage is not None:
            self._metrics.finished(chunk.usage, self._tenant.label)


def _submit(engine: EngineLike, submissions: Sequence[Submission]) -> Sequence[StreamLike]:
    param = submissions[0].param
    try:
        for one in submissions:
            param = one.param
            engine.check(one.ask)
        return engine.submit_all([one.ask for one in submissions])
    except (CapacityError, ClosedError, ConfigError, QueueFullError) as error:
        raise from_cache_error(error, param) from error


async def _pump(index: int, stream: StreamLike, queue: asyncio.Queue[tuple[int, Chunk] | None]) -> None:
    try:
        async for chunk in stream:
            queue.put_nowait((index, chunk))
    finally:
        queue.put_nowait(None)


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """Await `work`; None, and `work` cancelled, when the client hangs up first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watch.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
