"""Server-sent events: an event per object, `[DONE]` at the end, and the job aborted whatever way the response ends."""

import json
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from hicache.server.errors import ApiError
from hicache.server.job import Job
from hicache.server.wire import Json

DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Sends `objects` as they come. A client that hangs up cancels it, which aborts `job`."""

    def __init__(self, objects: AsyncIterator[Json], job: Job) -> None:
        super().__init__(_encode(objects), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.abort()


async def _encode(objects: AsyncIterator[Json]) -> AsyncIterator[bytes]:
    try:
        async for item in objects:
            yield event(item)
    except ApiError as error:
        # The status line has gone out already: the error is the last event.
        yield event(error.body())
    yield DONE


def event(item: Json) -> bytes:
    """One event; JSON without line breaks, so one `data:` line is enough."""
    return b"data: " + json.dumps(item, separators=(",", ":")).encode("ascii") + b"\n\n"
