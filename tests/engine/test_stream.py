"""A stream hands over every chunk once, in order, and ends with the last, however its consumer waits."""

import asyncio
import threading

from hicache.engine import Chunk
from hicache.engine.stream import Stream

CHUNKS = [Chunk(str(index), (index,)) for index in range(50)] + [Chunk("", (), "stop")]


def feed(stream: Stream) -> threading.Thread:
    def put() -> None:
        for chunk in CHUNKS:
            stream.put(chunk)

    thread = threading.Thread(target=put)
    thread.start()
    return thread


def test_a_loop_gets_all():
    stream = Stream(lambda: None)
    thread = feed(stream)
    assert list(stream) == CHUNKS
    assert list(stream) == []
    thread.join()


def test_an_async_loop_gets_all():
    async def read(stream: Stream) -> list[Chunk]:
        return [chunk async for chunk in stream]

    for _ in range(20):
        stream = Stream(lambda: None)
        thread = feed(stream)
        assert asyncio.run(read(stream)) == CHUNKS
        thread.join()


def test_an_async_loop_that_waits_is_woken():
    async def read() -> list[Chunk]:
        stream = Stream(lambda: None)

        async def all_chunks() -> list[Chunk]:
            return [chunk async for chunk in stream]

        reader = asyncio.create_task(all_chunks())
        await asyncio.sleep(0)
        await asyncio.to_thread(feed(stream).join)
        return await asyncio.wait_for(reader, 10)

    assert asyncio.run(read()) == CHUNKS


def test_what_one_loop_left_the_next_one_gets():
    async def read() -> list[Chunk]:
        stream, got = Stream(lambda: None), []
        for chunk in CHUNKS:
            stream.put(chunk)
        async for chunk in stream:
            got.append(chunk)
            if len(got) == 10:
                break
        return got + [chunk async for chunk in stream]

    assert asyncio.run(read()) == CHUNKS
