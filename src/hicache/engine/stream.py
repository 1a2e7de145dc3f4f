"""An answer while it is made: the engine's thread puts chunks in, one consumer takes them out, sync or async."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

from hicache.engine.types import Chunk


class Stream:
    """Chunks of one request, in order; the last one has a finish reason. For one consumer.

    Leaving an `async for` or a `for` early does not end the request: call `abort`.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._chunks: deque[Chunk] = deque()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None
        self._taken = False

    def abort(self) -> None:
        """Stop the work. The last chunk then has the reason "abort", unless the answer had ended already."""
        self._abort()

    def put(self, chunk: Chunk) -> None:
        """Called by the engine's thread."""
        with self._changed:
            self._chunks.append(chunk)
            self._changed.notify_all()
            wake = self._wake
        if wake is not None:
            wake()

    def __iter__(self) -> Iterator[Chunk]:
        while not self._taken:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks)
                chunk = self._chunks.popleft()
            self._taken = chunk.finish_reason is not None
            yield chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the consumer's loop has been closed: nobody is left to wake
                loop.call_soon_threadsafe(arrived.set)

        self._wake = wake
        try:
            while not self._taken:
                arrived.clear()
                chunk = self._next()
                if chunk is None:
                    await arrived.wait()
                    continue
                self._taken = chunk.finish_reason is not None
                yield chunk
        finally:
            self._wake = None

    def _next(self) -> Chunk | None:
        with self._changed:
            return self._chunks.popleft() if self._chunks else None
