"""Several caches that are given the same calls, each with losses, delays and a clock of its own."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hicache.builder import ModelDescription
from hicache.controller import DistributedAgree, Place
from hicache.layout import PoolGeometry
from hicache.storage import PageStore, StorageBackend
from hicache.testing.faults import Fault, FaultyBackend, seeded_faults
from hicache.testing.ranks import VirtualRanks
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.units import Tier
from tests.controller.driver import WINDOW_RATIOS, Driver, Request, Shelf, step
from tests.world import KINDS, World

RATES = (
    FaultRates(start=1.0),
    FaultRates(start=0.4),
    FaultRates(start=0.6, fail=0.1, partial=0.2),
    FaultRates(start=0.3, fail=0.05, partial=0.1),
)
LOSSES: tuple[dict[Fault, float], ...] = (
    {},
    {Fault.MISS: 0.1},
    {Fault.FAIL: 0.1, Fault.FLIP: 0.05},
    {Fault.RAISE: 0.1, Fault.STALE: 0.05},
)


def stage_of(model: ModelDescription, stage: int) -> ModelDescription:
    """The same pools with pages of other sizes, as another stage of a pipeline has them."""

    def wider(geometry: PoolGeometry) -> PoolGeometry:
        layers = tuple(
            tuple(replace(tensor, shape=(tensor.shape[0] + stage, *tensor.shape[1:])) for tensor in layer)
            for layer in geometry.layers
        )
        return replace(geometry, layers=layers)

    return replace(
        model,
        pools=tuple(
            replace(
                pool, geometry=wider(pool.geometry), packed_drafts=tuple(wider(draft) for draft in pool.packed_drafts)
            )
            for pool in model.pools
        ),
    )


@dataclass
class Shelves:
    """The stores that ranks attach one after the other, shared by all of them."""

    _made: dict[int, Shelf] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, number: int) -> Shelf:
        with self._lock:
            return self._made.setdefault(number, Shelf())


class RankDriver(Driver):
    """One rank's part in a run that follows from a seed: its set-up is everybody's, its luck its own."""

    def __init__(
        self,
        seed: int,
        agree: DistributedAgree,
        shelf: Callable[[int], StorageBackend],
        executor: Callable[[random.Random], Any],
    ) -> None:
        dice = random.Random(seed)
        luck = random.Random(f"{seed} {agree.rank}")
        self.requests = []
        self.tickets = []
        self.flushes = []
        self.executor = executor(luck)
        self.losses = luck.choice(LOSSES)
        self.luck = luck
        self.shelf = shelf
        self.attached = 0
        place = agree.place
        self.world = World(
            model=stage_of(KINDS[dice.choice(sorted(KINDS))], place.stage),
            device_pages=dice.randint(6, 16),
            host_pages=dice.randint(4, 24),
            executor=self.executor,
            backend=self._store(),
            write_policy=dice.choice(["write_through", "write_back"]),
            window_ratio=dice.choice(WINDOW_RATIOS),
            settings={
                "eviction_policy": dice.choice(["lru", "slru", "s3-fifo", "cost-aware"]),
                "prefetch_policy": dice.choice(["timeout", "best_effort", "wait_complete", "cost-aware"]),
            },
            agree=agree,
            place=f"{place.shard} {place.stage}",
        )
        self.world.clock.now_s = 1000.0 * agree.rank
        self.cache = self.world.cache
        self.cache.tell_compute_rate(dice.choice([0.1, 10.0, 1e6]))

    def _store(self):
        return FaultyBackend(self.shelf(self.attached), seeded_faults(self.luck.getrandbits(32), self.losses))

    def result(self, request: Request) -> None:
        """A load whose end not all ranks know has no result yet."""
        if request.load is not None and request.load.done:
            super().result(request)

    def reattach(self, *, empty: bool) -> None:
        self.cache.detach_storage_backend()
        self.attached += empty
        self.cache.attach_storage_backend(PageStore(self._store()))

    def finish(self) -> None:
        for request in self.requests:
            self.cache.release(request.match)
        self.requests.clear()
        self.world.clock.now_s += 1000.0
        while self.cache.in_flight:
            self.cache.poll()
        self.world.idle()
        for pool in self.cache.stats().pools:
            assert self.world.cache.controller.state.room(pool.pool, pool.tier) == pool.slots, pool


@dataclass(frozen=True)
class Ending:
    """What a rank's run came to: the digest of its tree after every call, and what was hit and moved."""

    digests: tuple[bytes, ...]
    hit_tokens: dict[Tier, int]
    moved: dict[str, int]


def simulated(luck: random.Random) -> SimulatedExecutor:
    """Transfers that this rank delays and loses."""
    return SimulatedExecutor(luck.getrandbits(32), luck.choice(RATES))


def place_of(rank: int, ranks: int, stages: int) -> Place:
    """Stages of as many shards each."""
    shards = ranks // stages
    return Place(rank % shards, shards, rank // shards, stages)


def walk_one(driver: RankDriver, seed: int, steps: int) -> Ending:
    """One rank's part in the calls that follow from a seed."""
    dice = random.Random(seed)
    digests = []
    for _ in range(steps):
        step(driver, dice)
        driver.check()
        digests.append(driver.cache.digest())
    driver.finish()
    stats = driver.cache.stats()
    digests.append(driver.cache.digest())
    driver.cache.close()
    moved = {name: count for name, count in stats.counters.items() if not name.endswith("_bytes")}
    return Ending(tuple(digests), dict(stats.hit_tokens), moved)


def walk(group: VirtualRanks, seed: int, steps: int, *, behind: int = 0, stages: int = 1) -> list[Ending]:
    """The same calls on every rank; how each of them ended."""
    shelves = Shelves()

    def one(rank: int) -> Ending:
        place = place_of(rank, group.ranks, stages)
        agree = DistributedAgree(group.channels[rank], behind=behind, place=place)
        return walk_one(RankDriver(seed, agree, shelves.get, simulated), seed, steps)

    return group.run(one)
