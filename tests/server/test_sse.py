"""Event streams: the job ends with the response, also when not a byte of it was sent."""

import asyncio
import json
from collections.abc import AsyncIterator

from starlette.types import Message

from hicache.engine.types import Ask, SamplingParams
from hicache.server.engine_metrics import EngineCollector
from hicache.server.errors import engine_failed
from hicache.server.job import Job, Submission
from hicache.server.metrics import ServerMetrics
from hicache.server.sse import EventStream, event
from hicache.server.wire import Json
from tests.server.fake_engine import FakeEngine


def job_on(engine: FakeEngine) -> Job:
    submission = Submission(Ask((97, 98), SamplingParams(max_tokens=1)), "prompt")
    return Job(
        engine,
        ServerMetrics(EngineCollector(engine.stats, engine.health)),
        [submission],
    )


def test_client_gone_before_the_first_byte_aborts() -> None:
    async def objects() -> AsyncIterator[Json]:
        yield {}

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await asyncio.Event().wait()

    engine = FakeEngine()
    response = EventStream(objects(), job_on(engine))
    asyncio.run(asyncio.wait_for(response({"type": "http"}, receive, send), 10))
    assert engine.streams[0].aborted.is_set()


def test_event_is_one_line_of_data() -> None:
    lines = event({"text": "a\nb\u2028é"}).decode("ascii").split("\n")
    assert lines[1:] == ["", ""]
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": "a\nb\u2028é"}


def test_error_is_the_last_event_before_done() -> None:
    async def objects() -> AsyncIterator[Json]:
        yield {"n": 1}
        raise engine_failed("gone")

    async def collect() -> list[str]:
        return [str(part) async for part in EventStream(objects(), job_on(FakeEngine())).body_iterator]

    first, second, last = asyncio.run(collect())
    assert '{"n":1}' in first
    assert '"code":"engine_error"' in second
    assert "[DONE]" in last
