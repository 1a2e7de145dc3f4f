"""A seeded executor that delays, reorders, fails and loses transfers. One seed replays a run exactly; no threads."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hicache.errors import ClosedError
from hicache.transfer import Backup, Clear, Completion, Delete, Fetch, Load, Message, Store
from hicache.transfer.work import run
from hicache.units import BoolArray, DeviceSlots, HostSlots, PoolName

_GARBAGE = 0xA5


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How often things happen, as probabilities."""

    start: float = 0.5
    """That a transfer that may run does so in this poll."""
    fail: float = 0.0
    """That a transfer fails as a whole, and leaves garbage where it was to write."""
    partial: float = 0.0
    """That some of a transfer's pages are garbage, and reported so."""
    lose: float = 0.0
    """That a completion does not come, until the executor is closed."""


class SimulatedExecutor:
    """Runs transfers inside `poll`, in an order and with faults that `seed` decides.

    Backups, loads, and stores with deletes and clears keep their order among themselves, as the protocol promises;
    anything else may overtake.
    Bytes move when a transfer runs, not when it is submitted: whoever reuses its slots too early is found out. `rates`
    may be replaced at any time.
    """

    def __init__(self, seed: int, rates: FaultRates) -> None:
        self._random = random.Random(seed)
        self.rates = rates
        self._waiting: list[Message] = []
        self._lost: list[tuple[Message, Completion]] = []
        self._closed = False

    @property
    def waiting(self) -> tuple[Message, ...]:
        """Transfers that have not run yet."""
        return tuple(self._waiting)

    @property
    def lost(self) -> int:
        """Completions that have not come."""
        return len(self._lost)

    def submit(self, message: Message) -> None:
        """Take a transfer on. Raises ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the simulated executor was closed; build a new cache")
        self._waiting.append(message)

    def poll(self) -> Sequence[Completion]:
        """Run some of what waits."""
        started = [message for message in self._runnable() if self._random.random() < self.rates.start]
        return self._end(started)

    def drain(self) -> Sequence[Completion]:
        """Run all that waits, faults included."""
        return self._end(list(self._waiting))

    def close(self) -> Sequence[Completion]:
        """Run all that waits; the lost completions come too."""
        self._closed = True
        ended = list(self.drain())
        lost, self._lost = self._lost, []
        return ended + [self._announce(message, completion) for message, completion in lost]

    def _runnable(self) -> list[Message]:
        """What may run now, in random order: of the kinds that keep their order only the first."""
        heads: dict[type[Message], Message] = {}
        free: list[Message] = []
        for message in self._waiting:
            if isinstance(message, Backup | Load | Store | Delete | Clear):
                heads.setdefault(Store if isinstance(message, Delete | Clear) else type(message), message)
            else:
                free.append(message)
        runnable = [*heads.values(), *free]
        self._random.shuffle(runnable)
        return runnable

    def _end(self, messages: Sequence[Message]) -> list[Completion]:
        ended = []
        for message in messages:
            self._waiting.remove(message)
            completion = self._run(message)
            if self._random.random() < self.rates.lose:
                self._lost.append((message, completion))
            else:
                ended.append(self._announce(message, completion))
        return ended

    def _announce(self, message: Message, completion: Completion) -> Completion:
        if isinstance(message, Load):
            message.progress.end()
        return completion

    def _run(self, message: Message) -> Completion:
        completion = run(message)
        if completion.error is not None:
            return completion
        if self._random.random() < self.rates.fail:
            spoil(message, {pool: np.zeros(len(good), dtype=np.bool_) for pool, good in completion.good.items()})
            return Completion(message.id, error="simulated failure")
        if self._random.random() < self.rates.partial:
            good = {pool: pages & self._some(len(pages)) for pool, pages in completion.good.items()}
            spoil(message, good)
            return replace(completion, good=good)
        return completion

    def _some(self, pages: int) -> BoolArray:
        return np.array([self._random.random() < 0.7 for _ in range(pages)], dtype=np.bool_)


def spoil(message: Message, good: Mapping[PoolName, BoolArray]) -> None:
    """Put garbage where a transfer was to write, for the pages that are not good."""
    if isinstance(message, Backup):
        for copy in message.plan.copies:
            copy.pages[copy.host_slots[~good[copy.pool]]] = _GARBAGE
    elif isinstance(message, Load):
        _spoil_load(message, good)
    elif isinstance(message, Fetch):
        for part in message.content:
            for page, right in zip(part.pages, good[part.pool], strict=True):
                if not right:
                    page[:] = bytes([_GARBAGE]) * len(page)


def _spoil_load(message: Load, good: Mapping[PoolName, BoolArray]) -> None:
    for layer in message.plan.layers:
        for part in layer:
            slots = DeviceSlots(part.copy.device_slots[~good[part.copy.pool]])
            garbage = np.full((len(slots), part.copy.pages.shape[1]), _GARBAGE, dtype=np.uint8)
            rows = HostSlots(np.arange(len(slots), dtype=np.int32))
            part.copy.device_pool.load_layer(slots, garbage, rows, part.layer)
