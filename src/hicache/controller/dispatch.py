"""The owner's side of transfers: what is in flight, and the slots that belong to it until it settles."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hicache.controller.agree import Agree, Seen, Subject
from hicache.controller.counters import Counters
from hicache.controller.place import Place
from hicache.transfer.executor import Executor
from hicache.transfer.messages import Backup, Completion, Event, Load, Message
from hicache.transfer.progress import LayerProgress
from hicache.tree import Receipt
from hicache.units import DeviceSlots, HostSlots, Int32Array, PoolName


@dataclass(frozen=True, slots=True)
class InFlight:
    """What a transfer owns until it settles: slots that nobody else may use, and how to go on afterwards.

    `elsewhere`: pages of pools that another rank moves for all ranks: as far as this one is concerned they are right.
    """

    settle: Callable[[Completion], None]
    device_slots: Mapping[PoolName, DeviceSlots] = field(default_factory=dict)
    host_slots: Mapping[PoolName, HostSlots] = field(default_factory=dict)
    progress: LayerProgress | None = None
    elsewhere: Mapping[PoolName, int] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Retired:
    """Device slots that nobody will use any more; they are free once the last of `holders` has given them back."""

    slots: Mapping[PoolName, Int32Array]
    holders: int = 1


@dataclass(eq=False, slots=True)
class Deferred:
    """Pins and slots that computation may still need: given back once it has passed `after`, on every rank.

    `seen`: it has on this one.
    """

    id: int
    after: Event
    receipts: tuple[Receipt, ...]
    retired: tuple[Retired, ...]
    seen: bool = False


class Dispatcher:
    """Submits messages, and settles what has ended on the owner's thread, in the same order on every rank."""

    def __init__(self, executor: Executor, agree: Agree, counters: Counters) -> None:
        self._executor = executor
        self._agree = agree
        self._counters = counters
        self._next_id = 0
        self._in_flight: dict[int, InFlight] = {}

    def next_id(self) -> int:
        """An id for a message that is about to be submitted."""
        self._next_id += 1
        return self._next_id

    def submit(self, message: Message, in_flight: InFlight) -> None:
        """Hand a message to the workers. Its slots are in flight from now on, unless this raises."""
        self._executor.submit(message)
        self._in_flight[message.id] = in_flight
        match message:
            case Backup():
                self._counters.backup_bytes += message.plan.nbytes
            case Load():
                self._counters.load_bytes += message.plan.nbytes
        if not self.alone:
            what = f"{type(message).__name__} {message.id}".encode()
            self._agree.note(Subject.TRANSFERS, what, *_bytes(in_flight))

    @property
    def place(self) -> Place:
        """Which part of the model this rank has."""
        return self._agree.place

    @property
    def alone(self) -> bool:
        """Whether there is one rank: what it sees needs nobody's consent."""
        return self._agree.ranks == 1

    def poll(self, deferred: Sequence[Deferred], now_s: float, standing: Callable[[], bytes]) -> list[Deferred]:
        """Settle what every rank has finished. Returns those of `deferred` whose computation has passed everywhere."""
        seen = [self._seen(completion) for completion in self._executor.poll()]
        for one in deferred:
            if not one.seen and one.after.query():
                one.seen = True
                seen.append(Completion(one.id))
        agreed = self._agree.step(Seen(seen, now_s, standing))
        self._settle(agreed)
        passed = {completion.id for completion in agreed}
        return [one for one in deferred if one.id in passed]

    def close(self) -> None:
        """Let the workers finish, then settle everything, whatever other ranks do."""
        self._settle((*self._agree.leave(), *(self._seen(completion) for completion in self._executor.close())))

    def _seen(self, completion: Completion) -> Completion:
        """What this rank has to say of a transfer."""
        in_flight = self._in_flight.get(completion.id)
        if in_flight is None:
            return completion
        others = {pool: np.ones(count, dtype=np.bool_) for pool, count in in_flight.elsewhere.items()}
        late = in_flight.progress is not None and in_flight.progress.ran_ahead
        return replace(completion, good={**completion.good, **others}, late=late)

    def in_flight(self) -> Iterator[InFlight]:
        """What is in flight now."""
        return iter(self._in_flight.values())

    @property
    def newest_id(self) -> int:
        """The last id given out."""
        return self._next_id

    @property
    def oldest_id(self) -> int:
        """The first id that is in flight, or the next one when none is."""
        return min(self._in_flight, default=self._next_id + 1)

    def __len__(self) -> int:
        return len(self._in_flight)

    def _settle(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            in_flight = self._in_flight.pop(completion.id, None)
            if in_flight is None:
                continue
            if in_flight.progress is not None:
                in_flight.progress.void = completion.late
            in_flight.settle(completion)


def _bytes(in_flight: InFlight) -> Iterator[bytes]:
    for slots in (in_flight.device_slots, in_flight.host_slots):
        for pool, run in slots.items():
            yield pool.encode()
            yield run.tobytes()
