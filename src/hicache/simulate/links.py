"""Transfers on a virtual clock: each link carries one thing after the other, and a seed decides what goes wrong.

A transfer's bytes move when it ends, not when it is asked for: whoever reuses its slots too early is found out.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

import numpy as np

from hicache.engine.segment import Segment
from hicache.errors import ClosedError
from hicache.simulate.clock import VirtualClock
from hicache.simulate.journal import Journal
from hicache.simulate.scenario import Faults, Hardware
from hicache.testing.simulator import spoil
from hicache.transfer import Backup, Clear, Completion, Delete, Fetch, Load, Message, Query, Store
from hicache.transfer.work import run

_MOST_LATE = 10
"""How many times as long as planned a transfer takes that is late, at most."""

_GOOD_PAGES = 0.7
"""How many pages of a transfer are good that goes wrong in part, on average."""


class Lane(Enum):
    """What transfers wait for each other on."""

    BACKUP = "backup"
    LOAD = "load"
    STORE = "store"
    FETCH = "fetch"


@dataclass(eq=False, slots=True)
class Job:
    """A transfer under way: from `start_s` to `end_s`, known to the owner at `ready_s`, and what becomes of it."""

    message: Message
    lane: Lane
    start_s: float
    end_s: float
    ready_s: float
    outcome: str
    completion: Completion | None = None
    lost: bool = False

    def layer_s(self, layer: int, layers: int) -> float:
        """When a layer of a load has arrived."""
        return self.start_s + (self.end_s - self.start_s) * (layer + 1) / layers


@dataclass(slots=True)
class Carried:
    """What one lane has carried. Bytes are those of the simulated machine."""

    transfers: int = 0
    nbytes: float = 0.0
    bad: int = 0
    busy_s: float = 0.0


class Links:
    """A transfer executor (see `hicache.transfer.Executor`) without threads."""

    def __init__(self, clock: VirtualClock, hardware: Hardware, faults: Faults, seed: int, journal: Journal) -> None:
        self._clock = clock
        self._hardware = hardware
        self._faults = faults
        self._random = random.Random(f"hicache links {seed}")
        self._journal = journal
        self._jobs: list[Job] = []
        self._lost: list[Job] = []
        self._free_s = {lane: [0.0] * (hardware.fetch_workers if lane is Lane.FETCH else 1) for lane in Lane}
        self._closed = False
        self.carried = {lane: Carried() for lane in Lane}

    @property
    def lost(self) -> int:
        """Completions that have not come, and will not before the end."""
        return len(self._lost)

    @property
    def next_s(self) -> float | None:
        """When the next completion can be polled; None if nothing is under way."""
        return min((job.ready_s for job in self._jobs), default=None)

    def submit(self, message: Message) -> None:
        """Take a transfer on. Raises ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the simulated links were closed; build a new cache")
        lane, nbytes = _lane(message), _nbytes(message) * self._hardware.byte_scale
        storage = lane in (Lane.STORE, Lane.FETCH)
        latency_s = self._hardware.storage_latency_s if storage else self._hardware.host_latency_s
        rate = self._hardware.storage_bytes_per_s if storage else self._hardware.host_bytes_per_s
        took_s = latency_s + nbytes / rate
        if self._random.random() < self._faults.late:
            took_s *= self._random.uniform(1, _MOST_LATE)
        free_s = self._free_s[lane]
        worker = free_s.index(min(free_s))
        start_s = max(self._clock.now_s, free_s[worker])
        free_s[worker] = end_s = start_s + took_s
        ready_s = end_s + (took_s if self._random.random() < self._faults.late else 0.0)
        job = Job(message, lane, start_s, end_s, ready_s, self._outcome(), lost=self._draw(self._faults.lose))
        self._jobs.append(job)
        self._count(job, nbytes)
        self._journal.note(f"{_name(message)} {message.id} {nbytes:.0f} bytes until {end_s:.9f}")

    def poll(self) -> Sequence[Completion]:
        """What has ended by now."""
        return list(self._announce(self._ready(self._clock.now_s)))

    def close(self) -> Sequence[Completion]:
        """End everything at once; completions that were lost come too."""
        self._closed = True
        ended = list(self._announce(self._ready(float("inf"))))
        lost, self._lost = self._lost, []
        for job in lost:
            job.lost = False
        return [*ended, *self._announce(lost)]

    def loads_of(self, segments: Sequence[Segment]) -> list[Job]:
        """The loads under way that bring what these segments read."""
        loads = [job for job in self._jobs if job.lane is Lane.LOAD]
        return [job for job in loads if any(_touches(job.message, segment) for segment in segments)]

    def wait_layer(self, job: Job, layer: int, layers: int) -> None:
        """Let time pass until a layer is there, or the load has ended, or it is given up."""
        if job not in self._jobs or not self._has_time(job.layer_s(layer, layers)):
            return
        self._move(self._clock.now_s)
        if isinstance(job.message, Load) and job.outcome != "fail" and job.completion is None:
            job.message.plan.run_layer(layer)
            job.message.progress.arrive(layer)

    def wait_end(self, job: Job) -> None:
        """Let time pass until a load's completion can be polled, or it is given up."""
        if job not in self._jobs or not self._has_time(job.ready_s):
            return
        self._move(self._clock.now_s)
        if isinstance(job.message, Load) and not job.lost:
            job.message.progress.end()

    def _has_time(self, time_s: float) -> bool:
        """Pass to that time, or as far as patience goes."""
        patience_s = self._clock.now_s + self._hardware.transfer_timeout_s
        self._clock.pass_to(min(time_s, patience_s))
        return time_s <= patience_s

    def _ready(self, now_s: float) -> list[Job]:
        self._move(now_s)
        ready = sorted((job for job in self._jobs if job.ready_s <= now_s), key=_when_ready)
        if ready:
            self._jobs = [job for job in self._jobs if job.ready_s > now_s]
        return ready

    def _announce(self, jobs: Sequence[Job]) -> Iterator[Completion]:
        for job in jobs:
            if job.lost:
                self._lost.append(job)
                self._journal.note(f"{job.message.id} is lost")
                continue
            completion = job.completion
            assert completion is not None  # it has ended, so it was run
            self._journal.note(f"{job.message.id} ended {job.outcome}")
            if isinstance(job.message, Load):
                job.message.progress.end()
            yield completion

    def _move(self, now_s: float) -> None:
        """Move the bytes of what has ended, in order."""
        due = [job for job in self._jobs if job.completion is None and job.end_s <= now_s]
        for job in sorted(due, key=_when_ended):
            job.completion = self._run(job)

    def _run(self, job: Job) -> Completion:
        completion = run(job.message)
        if completion.error is not None or job.outcome == "well":
            return completion
        if job.outcome == "fail":
            spoil(job.message, {pool: np.zeros(len(good), np.bool_) for pool, good in completion.good.items()})
            return Completion(job.message.id, error="simulated failure")
        good = {}
        for pool, pages in completion.good.items():
            some = np.array([self._draw(_GOOD_PAGES) for _ in range(len(pages))], np.bool_)
            good[pool] = pages & some
        spoil(job.message, good)
        return replace(completion, good=good)

    def _outcome(self) -> str:
        if self._draw(self._faults.fail):
            return "fail"
        return "partial" if self._draw(self._faults.partial) else "well"

    def _draw(self, rate: float) -> bool:
        return self._random.random() < rate

    def _count(self, job: Job, nbytes: float) -> None:
        carried = self.carried[job.lane]
        carried.transfers += 1
        carried.nbytes += nbytes
        carried.bad += job.outcome != "well" or job.lost
        carried.busy_s += job.end_s - job.start_s


def _when_ready(job: Job) -> tuple[float, int]:
    return job.ready_s, job.message.id


def _when_ended(job: Job) -> tuple[float, int]:
    return job.end_s, job.message.id


def _touches(message: Message, segment: Segment) -> bool:
    """Whether a load brings something to slots that a segment names."""
    if not isinstance(message, Load):
        return False
    for copy in {id(part.copy): part.copy for layer in message.plan.layers for part in layer}.values():
        if copy.pool in segment.slots and np.isin(copy.device_slots, segment.slots[copy.pool]).any():
            return True
        if segment.state_from is not None and segment.state_from.get(copy.pool, -1) in copy.device_slots:
            return True
    return False


def _lane(message: Message) -> Lane:
    match message:
        case Backup():
            return Lane.BACKUP
        case Load():
            return Lane.LOAD
        case Store() | Delete() | Clear():
            return Lane.STORE
        case Fetch() | Query():
            return Lane.FETCH
    assert_never(message)


def _nbytes(message: Message) -> int:
    match message:
        case Backup() | Load():
            return message.plan.nbytes
        case Store() | Fetch():
            return sum(page.nbytes for part in message.content for page in part.pages)
        case Query() | Delete() | Clear():
            return 0
    assert_never(message)


def _name(message: Message) -> str:
    return type(message).__name__.lower()
