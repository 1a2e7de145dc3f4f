"""What a retracted request has away from the device: a parcel keeps its slots until its transfer has settled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

from hicache.controller.dispatch import InFlight, Retired
from hicache.controller.loads import LoadBack, Waiter
from hicache.controller.state import State
from hicache.controller.stores import Attachment
from hicache.pools import PoolTransfer
from hicache.storage import StorageKey
from hicache.transfer.messages import Completion, Delete, Event, Load, Message
from hicache.transfer.progress import LayerProgress
from hicache.tree import Receipt, Span
from hicache.units import HOLE, BoolArray, DeviceSlots, HostSlots, Int32Array, PoolName, Tier

Slots = Mapping[PoolName, Int32Array]


_NO_LOADS = LoadBack((), {})


class Stage(Enum):
    """How far a parcel has come."""

    LEAVING = "leaving"
    """It is copied off the device, whose slots are in flight."""
    AWAY = "away"
    """The host or storage has all of it."""
    RETURNING = "returning"
    """It is copied into new device slots, which are in flight."""
    ARRIVED = "arrived"
    """It is on the device, and its request has not been told."""
    LOST = "lost"
    """A copy failed: the request has to be computed again."""


class Owner(Waiter, Protocol):
    """The request that a parcel belongs to. What it shares comes by ordinary loads."""

    def parcel_expected(self, loads: LoadBack) -> None:
        """The parcel is on its way back, and so are shared pages: each load will be told to have settled."""

    def parcel_arrived(self, *, good: bool) -> None:
        """The request's own slots are no longer in flight; without `good` they don't hold what they should."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What a request has in the tree: pages of `span` (from page 0), in each pool from its page in `starts` on.

    `expected`: which of these pages there are; bool per page of the span.
    """

    span: Span
    starts: Mapping[PoolName, int]
    expected: Mapping[PoolName, BoolArray]

    def dirty(self, state: State) -> dict[PoolName, BoolArray]:
        """Which of the expected pages have no host copy."""
        return {
            pool: pages & (state.slots(self.span, pool, Tier.HOST) == HOLE) for pool, pages in self.expected.items()
        }

    def on_device(self, state: State) -> bool:
        """Whether all expected pages are on the device."""
        return not any(
            (pages & (state.slots(self.span, pool, Tier.DEVICE) == HOLE)).any() for pool, pages in self.expected.items()
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """A private object: its keys follow from a nonce, so nobody else has them."""

    attachment: Attachment
    keys: Mapping[PoolName, tuple[StorageKey, ...]]


@dataclass(frozen=True, slots=True)
class Return:
    """A parcel that its request can run on: where its own slots are now, and the pin of what it shares."""

    slots: Slots
    receipt: Receipt
    progress: tuple[LayerProgress, ...]


@dataclass(eq=False, slots=True)
class Parcel:
    """A request's own state. `sizes`: slots per pool; `device` and `host`: those it has at the moment."""

    shared: Shared
    sizes: Mapping[PoolName, int]
    device: Slots
    host: Slots
    receipts: list[Receipt]
    stored: Stored | None = None
    stage: Stage = Stage.LEAVING
    moving: bool = False
    ended: bool = False
    after: Event | None = None
    asked_s: float | None = None
    loads: LoadBack = _NO_LOADS


class Parcels:
    """All parcels. Each has at most one transfer in flight, and keeps its slots until that has settled."""

    def __init__(self, state: State, attachment: Callable[[], Attachment | None]) -> None:
        self._state = state
        self._attachment = attachment
        self.all: list[Parcel] = []

    def move(self, parcel: Parcel, message: Message, settle: Callable[[Completion], None]) -> None:
        """Submit a parcel's transfer. `settle` runs once it has settled, unless nobody wants the parcel any more."""
        progress = message.progress if isinstance(message, Load) else None
        self._state.dispatcher.submit(message, InFlight(partial(self._settled, parcel, settle), progress=progress))
        parcel.moving = True

    def _settled(self, parcel: Parcel, settle: Callable[[Completion], None], completion: Completion) -> None:
        parcel.moving = False
        parcel.asked_s = None
        if parcel.ended or parcel.stage is Stage.LOST:
            self.free(parcel)
        else:
            settle(completion)

    def is_good(self, slots: Slots, completion: Completion) -> bool:
        """Whether every slot of a parcel's transfer was copied as it should, in every pool."""
        return all(self._state.good(pool, len(run), completion.good).all() for pool, run in slots.items())

    def lose(self, parcel: Parcel) -> None:
        """The request has to be computed again."""
        parcel.stage = Stage.LOST
        self._state.counters.retraction_lost += 1
        self._let_go(parcel)

    def end(self, parcel: Parcel, after: Event | None) -> None:
        """The request has gone. Computation may go on with the device slots until `after`."""
        parcel.ended = True
        parcel.after = after
        self._let_go(parcel)

    def _let_go(self, parcel: Parcel) -> None:
        self.delete(parcel)
        if not parcel.moving:
            self.free(parcel)

    def free(self, parcel: Parcel) -> None:
        """Give back whatever a parcel has."""
        self._state.give_back(parcel.receipts, [Retired(parcel.device)], parcel.after)
        self._state.free_host(parcel.host)
        parcel.receipts, parcel.device, parcel.host = [], {}, {}
        if parcel in self.all:
            self.all.remove(parcel)

    def delete(self, parcel: Parcel) -> None:
        """Take a parcel out of storage, if it is in what is attached now."""
        stored, parcel.stored = parcel.stored, None
        if stored is None or stored.attachment is not self._attachment():
            return
        keys = tuple(key for pool in stored.keys.values() for key in pool)
        message = Delete(self._state.dispatcher.next_id(), stored.attachment.store, keys)
        self._state.dispatcher.submit(message, InFlight(_ignore))


def counts(slots: Slots) -> dict[PoolName, int]:
    """How many slots there are per pool."""
    return {pool: len(run) for pool, run in slots.items()}


def transfers(state: State, device: Slots, host: Slots) -> tuple[PoolTransfer, ...]:
    """Between device slots and as many host slots, with the pools that are derived from theirs."""
    return state.transfers(
        {pool: DeviceSlots(run) for pool, run in device.items()}, {pool: HostSlots(run) for pool, run in host.items()}
    )


def _ignore(completion: Completion) -> None:
    """What could not be deleted is left to the store."""
