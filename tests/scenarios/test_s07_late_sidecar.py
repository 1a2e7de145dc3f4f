"""S07: a prefetch that is stopped while a sidecar's read is late publishes and frees nothing before all reads end."""

import threading
from collections.abc import Sequence

import pytest

from hicache.storage import ReadResult, StorageKey
from hicache.storage.memory import MemoryBackend
from hicache.transfer import ThreadExecutor
from hicache.units import Tier
from tests.world import DERIVED, PAGE, THREE_POOLS, World, tokens

PROMPT = tokens(*range(4 * PAGE + 1))


class LateSidecar(MemoryBackend):
    """Reads of one pool wait; then they go on, or fail."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.pool = pool
        self.open = threading.Event()
        self.open.set()
        self.reading = threading.Event()
        self.fails = False

    def read(self, keys: Sequence[StorageKey], values) -> ReadResult:
        if keys and keys[0].pool == self.pool:
            self.reading.set()
            assert self.open.wait(30.0)
            if self.fails:
                return ReadResult.nothing(len(keys))
        return super().read(keys, values)

    def close(self) -> None:
        """Outlives the cache."""


@pytest.mark.parametrize(("model", "late"), [(DERIVED, "indexer"), (DERIVED, "kv"), (THREE_POOLS, "swa")])
@pytest.mark.parametrize("how", ["deadline", "cancel", "detach"])
@pytest.mark.parametrize("fails", [False, True])
def test_pages_belong_to_the_fetch_until_all_its_reads_have_ended(model, late, how, fails):
    backend = LateSidecar(late)
    first = World(model, backend=backend)
    first.serve(PROMPT)
    first.settle()
    first.cache.close()
    backend.open.clear()
    backend.fails = fails
    world = World(model, backend=backend, executor=ThreadExecutor(), timeout_s=30.0, host_pages=8, batch_pages=8)
    ticket = world.cache.prefetch(PROMPT, world.namespace, timeout_s=0.05)
    while not backend.reading.is_set():
        world.cache.poll()
    world.clock.now_s = 0.1 if how == "deadline" else 0.0
    if how == "cancel":
        world.cache.cancel_prefetch(ticket)
    if how == "detach":
        world.cache.detach_storage_backend()
    world.cache.poll()
    assert ticket.done
    assert world.cached(PROMPT) == (0, 0), "no page is published"
    for start in (1000, 2000, 3000):
        world.serve(tokens(*range(start, start + 3 * PAGE + 1)))
        while world.cache.stats().in_flight > 1:
            world.cache.poll()
        world.cache.audit()
    world.cache.evict(Tier.HOST)
    free = {pool.pool: pool.free for pool in world.cache.stats().pools if pool.tier is Tier.HOST}
    assert free["kv"] == 4, "and none is given to others"
    backend.open.set()
    while world.cache.stats().in_flight:
        world.cache.poll()
    world.cache.audit()
    hit = world.cached(PROMPT)[1]
    assert hit == (0 if fails else 4 * PAGE)
    match = world.prefill(PROMPT)
    world.cache.release(match)
    while world.cache.stats().in_flight:
        world.cache.poll()
    world.idle()
    world.cache.close()
