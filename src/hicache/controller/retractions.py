"""A request leaves the device whole and comes back whole: its own state as a parcel, what it shares by the tree."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

import numpy as np

from hicache.controller.backup import Backups
from hicache.controller.loads import Loads
from hicache.controller.parcels import Owner, Parcel, Parcels, Return, Shared, Slots, Stage, counts, transfers
from hicache.controller.spills import Spills
from hicache.controller.state import State
from hicache.controller.stores import Attachment
from hicache.pools import plan_backup, plan_load
from hicache.transfer.messages import Backup, Completion, Event, Load
from hicache.transfer.progress import LayerProgress
from hicache.tree import Pin, Receipt, Span
from hicache.units import HOLE, PoolName, Tier


class Retractions:
    """Takes requests off the device, to the host or on to storage, and brings them back."""

    def __init__(
        self,
        state: State,
        backups: Backups,
        loads: Loads,
        attachment: Callable[[], Attachment | None],
        batch_pages: int,
    ) -> None:
        self._state = state
        self._backups = backups
        self._loads = loads
        self._attachment = attachment
        self._parcels = Parcels(state, attachment)
        self._spills = Spills(state, self._parcels, loads, batch_pages)

    @property
    def parcels(self) -> tuple[Parcel, ...]:
        """Those that have slots."""
        return tuple(self._parcels.all)

    def shared(self, span: Span, starts: Mapping[PoolName, int]) -> Shared:
        """What a request stands on, as it is on the device now."""
        expected = {}
        for pool in self._state.pools:
            pages = self._state.slots(span, pool, Tier.DEVICE) != HOLE
            pages[: starts[pool]] = False
            expected[pool] = pages
        return Shared(self._state.tree.narrow(span), starts, expected)

    def to_host(self, shared: Shared, own: Slots, after: Event | None) -> Parcel | None:
        """Copy a request's own slots to the host, and what it shares and has no host copy, in one reservation.

        Host copies of what it shares stay from now on, and device copies may go once there are host copies. The own
        slots are the parcel's. None, with nothing taken, when the host is full.
        """
        state = self._state
        with ExitStack() as undo:
            receipt = state.tree.pin_from(shared.span, Pin.HOST, shared.starts)
            undo.callback(state.tree.unpin, receipt)
            host = self._backups.start_with(shared.span, shared.starts, counts(own), after)
            if host is None:
                return None
            undo.callback(state.free_host, host)
            parcel = Parcel(shared, counts(own), own, host, [receipt])
            plan = plan_backup(state.group, transfers(state, own, host))
            message = Backup(state.dispatcher.next_id(), plan, after)
            self._parcels.move(parcel, message, partial(self._left, parcel))
            undo.pop_all()
        self._parcels.all.append(parcel)
        state.counters.retraction_backups += 1
        return parcel

    def _left(self, parcel: Parcel, completion: Completion) -> None:
        dirty = any(pages.any() for pages in parcel.shared.dirty(self._state).values())
        if dirty or not self._parcels.is_good(parcel.device, completion):
            self._parcels.lose(parcel)
            return
        self._state.free_device(parcel.device)
        parcel.device = {}
        parcel.stage = Stage.AWAY

    def clean(self, shared: Shared) -> Shared:
        """The pages that the host has of what a request shares, up to the first that is on the device only.

        None of them when no pool needs any: then nothing would pin them.
        """
        dirty = np.logical_or.reduce(list(shared.dirty(self._state).values()))
        pages = int(dirty.argmax()) if dirty.any() else len(dirty)
        if all(start >= pages for start in shared.starts.values()):
            pages = 0
        span = self._state.tree.narrow(Span(shared.span.node, 0, pages))
        return Shared(span, shared.starts, {pool: run[:pages] for pool, run in shared.expected.items()})

    def to_storage(
        self, shared: Shared, own: Slots, source: Slots, receipts: list[Receipt], after: Event | None
    ) -> Parcel | None:
        """Copy `source` (the own slots, and others that `receipts` pin) to storage by way of a few host slots.

        None, with nothing taken, without storage or when the host has not even those.
        """
        attachment = self._attachment()
        if attachment is None:
            return None
        return self._spills.start(shared, own, source, receipts, after, attachment)

    def restore(self, parcel: Parcel, owner: Owner, now_s: float, timeout_s: float) -> Return | None:
        """Bring a parcel back, and what it shares, into device slots that are reserved at once.

        None: it has not left yet, is on its way from storage, or the device is full; or it is lost, as its stage says.
        """
        if parcel.stage is Stage.AWAY and parcel.stored is None:
            return self._from_host(parcel, owner)
        if parcel.stage in (Stage.AWAY, Stage.ARRIVED):
            return self._spills.restore(parcel, owner)
        if parcel.stage is not Stage.LOST:
            self._keep_waiting(parcel, now_s, timeout_s)
        return None

    def room_after(self, parcel: Parcel) -> dict[PoolName, int]:
        """Per pool, the device slots that would be free or evictable if a parcel came back; below 0, that many lack."""
        state, shared = self._state, parcel.shared
        receipt = state.tree.pin_from(shared.span, Pin.HERE, shared.starts)
        room = {pool: state.room(pool, Tier.DEVICE) for pool in state.pools}
        state.tree.unpin(receipt)
        for pool, pages in shared.expected.items():
            gone = pages & (state.slots(shared.span, pool, Tier.DEVICE) == HOLE)
            room[pool] -= int(gone.sum()) + parcel.sizes.get(pool, 0)
        return room

    def _keep_waiting(self, parcel: Parcel, now_s: float, timeout_s: float) -> None:
        """A transfer that does not settle for so long is given up."""
        if parcel.asked_s is None:
            parcel.asked_s = now_s
        elif now_s - parcel.asked_s > timeout_s:
            self._parcels.lose(parcel)

    def _from_host(self, parcel: Parcel, owner: Owner) -> Return | None:
        state, shared = self._state, parcel.shared
        with ExitStack() as undo:
            receipt = state.tree.pin_from(shared.span, Pin.HERE, shared.starts)
            undo.callback(state.tree.unpin, receipt)
            started = self._loads.start_with(shared.span, shared.starts, parcel.sizes, owner)
            if started is None:
                return None
            loads, slots = started
            undo.callback(state.free_device, slots)
            progress = LayerProgress(state.group.layer_count)
            plan = plan_load(state.group, transfers(state, slots, parcel.host))
            message = Load(state.dispatcher.next_id(), plan, progress)
            self._parcels.move(parcel, message, partial(self._returned, parcel, owner))
            undo.pop_all()
        parcel.device, parcel.stage = slots, Stage.RETURNING
        owner.parcel_expected(loads)
        return Return(slots, receipt, (*(op.progress for op in loads.ops), progress))

    def _returned(self, parcel: Parcel, owner: Owner, completion: Completion) -> None:
        good = self._parcels.is_good(parcel.device, completion)
        parcel.device = {}
        self._parcels.free(parcel)
        owner.parcel_arrived(good=good)

    def discard(self, parcel: Parcel, after: Event | None) -> None:
        """The request has gone: give back what the parcel has, at whatever stage it is."""
        self._parcels.end(parcel, after)

    def leave_store(self) -> None:
        """The store that is attached will be no longer: what lies there is lost."""
        for parcel in self.parcels:
            if parcel.stored is not None:
                self._parcels.lose(parcel)
