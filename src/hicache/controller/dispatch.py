"""The owner's side of transfers: what is in flight, and the slots that belong to it until it settles."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hicache.controller.agree import Agree
from hicache.controller.counters import Counters
from hicache.transfer.executor import Executor
from hicache.transfer.messages import Backup, Completion, Event, Load, Message
from hicache.tree import Receipt
from hicache.units import DeviceSlots, HostSlots, Int32Array, PoolName


@dataclass(frozen=True, slots=True)
class InFlight:
    """What a transfer owns until it settles: slots that nobody else may use, and how to go on afterwards."""

    settle: Callable[[Completion], None]
    device_slots: Mapping[PoolName, DeviceSlots] = field(default_factory=dict)
    host_slots: Mapping[PoolName, HostSlots] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Retired:
    """Device slots that nobody will use any more; they are free once the last of `holders` has given them back."""

    slots: Mapping[PoolName, Int32Array]
    holders: int = 1


@dataclass(frozen=True, slots=True)
class Deferred:
    """Pins and slots that computation may still need: given back once it has passed `after`."""

    after: Event
    receipts: tuple[Receipt, ...]
    retired: tuple[Retired, ...]


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

    def poll(self) -> None:
        """Settle what every rank has finished."""
        self._settle(self._executor.poll())

    def close(self) -> None:
        """Let the workers finish, then settle everything."""
        self._settle(self._executor.close())

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
        for completion in self._agree.completions(completions):
            in_flight = self._in_flight.pop(completion.id, None)
            if in_flight is not None:
                in_flight.settle(completion)
