"""S04: a backup that starts while the computation still writes waits for it; what is stored is what was computed."""

import pytest

from hicache.storage.memory import MemoryBackend
from hicache.testing.streams import StreamExecutor, VirtualStream
from hicache.units import Tier
from tests.world import MODELS, PAGE, World, tokens

PROMPT = tokens(*range(5 * PAGE + 1))


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("released", [False, True])
def test_the_copy_stream_waits_for_the_compute_stream(model, released):
    streams, computing = StreamExecutor(), VirtualStream()
    world = World(MODELS[model], executor=streams, backend=MemoryBackend())

    def transfers() -> None:
        for _ in range(10):
            for stream in (streams.backups, streams.loads, streams.storage):
                stream.run()
            world.cache.poll()

    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.allocate(match, 5 * PAGE + 1)
    runs = {name: match.slots(world._source(name))[:5].copy() for name, _ in world._device_pools()}
    computing.enqueue(
        lambda: [world._write(name, pool, runs[name], PROMPT) for name, pool in world._device_pools()] and None
    )
    match = world.cache.insert(match, PROMPT, computing.record_event())
    if released:
        world.cache.release(match)
    transfers()
    counters = world.cache.stats().counters
    assert (counters["backup_pages"], counters["store_pages"]) == (0, 0), "nothing is copied yet"
    assert len(streams.backups)
    world.cache.audit()
    computing.run()
    transfers()
    if not released:
        world.cache.release(match)
    counters = world.cache.stats().counters
    assert counters["store_pages"] == counters["backup_pages"] >= 5
    world.cache.poll()
    assert world.cache.evict(Tier.DEVICE) == 5
    assert world.cache.evict(Tier.HOST) == 5
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    transfers()
    assert ticket.done
    match = world.cache.match_prefix(PROMPT, world.namespace, ticket)
    load = world.cache.load_back(match)
    transfers()
    assert load.result() == 5 * PAGE
    world.check(match)
    world.cache.release(match)
    transfers()
    world.idle()
