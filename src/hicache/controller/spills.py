"""A parcel that the host has no room for lies in storage, under keys that nobody else can have."""

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

import numpy as np

from hicache.controller.loads import Loads
from hicache.controller.parcels import Owner, Parcel, Parcels, Return, Shared, Slots, Stage, Stored, counts, transfers
from hicache.controller.state import State
from hicache.controller.stores import Attachment
from hicache.errors import InvariantError
from hicache.keys import KEY_BYTES, page_keys
from hicache.pools import plan_backup, plan_load
from hicache.storage import StorageKey, chain_keys
from hicache.transfer.messages import Backup, Completion, Event, Fetch, Load, Store, StoredPages
from hicache.transfer.progress import LayerProgress
from hicache.tree import Pin, Receipt
from hicache.units import HostSlots, PoolName, Tier


class Spills:
    """Moves parcels between device and storage in batches, through as many host slots as there are to be had."""

    def __init__(self, state: State, parcels: Parcels, loads: Loads, batch_pages: int) -> None:
        self._state = state
        self._parcels = parcels
        self._loads = loads
        self._batch_pages = batch_pages

    def start(
        self,
        shared: Shared,
        own: Slots,
        source: Slots,
        receipts: list[Receipt],
        after: Event | None,
        attachment: Attachment,
    ) -> Parcel | None:
        """Copy `source` to storage: the own slots, which are the parcel's from now on, and others pinned by `receipts`.

        None, with nothing taken, when the host has no slot to copy through.
        """
        state = self._state
        with ExitStack() as undo:
            receipt = state.tree.pin_from(shared.span, Pin.HOST, shared.starts)
            undo.callback(state.tree.unpin, receipt)
            sizes = counts(source)
            staging = self._stage(sizes)
            if staging is None:
                return None
            undo.callback(state.free_host, staging)
            stored = Stored(attachment, self._keys(sizes))
            parcel = Parcel(shared, sizes, own, staging, [receipt, *receipts], stored)
            self._copy(parcel, source, after, 0)
            undo.pop_all()
        self._parcels.all.append(parcel)
        state.counters.retraction_backups += 1
        state.counters.retraction_spilled += 1
        return parcel

    def restore(self, parcel: Parcel, owner: Owner) -> Return | None:
        """Begin to bring a parcel back, or hand it over once it has arrived. Until then None: ask again.

        When the host has no slot to copy through, and no transfer that might free one, the parcel is lost.
        """
        if parcel.stage is Stage.ARRIVED:
            return self._hand_over(parcel, owner)
        state, shared = self._state, parcel.shared
        with ExitStack() as undo:
            staging = self._stage(parcel.sizes)
            if staging is None and not len(state.dispatcher):
                self._parcels.lose(parcel)
            if staging is None:
                return None
            undo.callback(state.free_host, staging)
            receipt = state.tree.pin_from(shared.span, Pin.HERE, shared.starts)
            undo.callback(state.tree.unpin, receipt)
            started = self._loads.start_with(shared.span, shared.starts, parcel.sizes, owner)
            if started is None:
                return None
            undo.pop_all()
        parcel.loads, parcel.device = started
        parcel.host, parcel.stage = staging, Stage.RETURNING
        parcel.receipts.append(receipt)
        owner.parcel_expected(parcel.loads)
        self._fetch(parcel, 0)
        return None

    def _hand_over(self, parcel: Parcel, owner: Owner) -> Return:
        slots, receipt = parcel.device, parcel.receipts.pop()
        parcel.device = {}
        self._parcels.free(parcel)
        owner.parcel_arrived(good=True)
        return Return(slots, receipt, tuple(op.progress for op in parcel.loads.ops))

    def _stage(self, sizes: Mapping[PoolName, int]) -> Slots | None:
        """Host slots to copy through, of every pool some, or None."""
        demand = {}
        for pool, size in sizes.items():
            demand[pool] = min(size, self._batch_pages, self._state.room(pool, Tier.HOST))
            if demand[pool] == 0:
                return None
        reservation = self._state.group.reserve(demand, Tier.HOST)
        return None if reservation is None else reservation.commit()

    def _keys(self, sizes: Mapping[PoolName, int]) -> dict[PoolName, tuple[StorageKey, ...]]:
        """A key per slot, and per pool derived from its pool, from a nonce that is drawn now."""
        nonce = secrets.token_bytes(KEY_BYTES)
        keys = {}
        for pool, size in sizes.items():
            pages = page_keys(nonce, np.arange(size, dtype="<u4").tobytes(), 1)
            for member in self._state.members(pool):
                keys[member] = tuple(chain_keys(nonce, member, nonce, pages, private=True))
        return keys

    def _batch(self, parcel: Parcel, slots: Slots, number: int) -> tuple[Slots, Slots]:
        """Of a parcel's `slots` those of one batch, and the host slots that they go through; empty after the last."""
        chosen, staging = {}, {}
        for pool, run in slots.items():
            step = len(parcel.host[pool])
            part = run[number * step : (number + 1) * step]
            if len(part):
                chosen[pool] = part
                staging[pool] = parcel.host[pool][: len(part)]
        return chosen, staging

    def _content(self, parcel: Parcel, stored: Stored, staging: Slots, number: int) -> tuple[StoredPages, ...]:
        content = []
        for pool, run in staging.items():
            first = number * len(parcel.host[pool])
            for member in self._state.members(pool):
                keys = stored.keys[member][first : first + len(run)]
                content.append(StoredPages(member, keys, self._state.views(member, HostSlots(run))))
        return tuple(content)

    def _copy(self, parcel: Parcel, source: Slots, after: Event | None, number: int) -> None:
        """Device to host, of one batch."""
        state = self._state
        slots, staging = self._batch(parcel, source, number)
        plan = plan_backup(state.group, transfers(state, slots, staging))
        message = Backup(state.dispatcher.next_id(), plan, after)
        self._parcels.move(parcel, message, partial(self._store, parcel, source, number))

    def _store(self, parcel: Parcel, source: Slots, number: int, completion: Completion) -> None:
        """Host to storage; the device slots are free."""
        slots, staging = self._batch(parcel, source, number)
        stored = parcel.stored
        if stored is None or not self._parcels.is_good(slots, completion):
            self._parcels.lose(parcel)
            return
        self._free_own(parcel, slots)
        content = self._content(parcel, stored, staging, number)
        message = Store(self._state.dispatcher.next_id(), stored.attachment.store, content)
        self._parcels.move(parcel, message, partial(self._stored, parcel, source, number))

    def _free_own(self, parcel: Parcel, slots: Slots) -> None:
        left = {}
        for pool, run in parcel.device.items():
            gone = np.isin(run, slots.get(pool, run[:0]))
            self._state.free_device({pool: run[gone]})
            left[pool] = run[~gone]
        parcel.device = left

    def _stored(self, parcel: Parcel, source: Slots, number: int, completion: Completion) -> None:
        slots, _ = self._batch(parcel, source, number)
        if not self._parcels.is_good(slots, completion):
            self._parcels.lose(parcel)
        elif self._batch(parcel, source, number + 1)[0]:
            self._copy(parcel, source, None, number + 1)
        else:
            self._rest(parcel)

    def _rest(self, parcel: Parcel) -> None:
        """All is in storage: the host's slots are free, and what was only pinned to be copied may go."""
        self._state.free_host(parcel.host)
        self._state.give_back(parcel.receipts[1:], (), None)
        parcel.host, parcel.receipts = {}, parcel.receipts[:1]
        parcel.stage = Stage.AWAY

    def _fetch(self, parcel: Parcel, number: int) -> None:
        """Storage to host, of one batch."""
        _, staging = self._batch(parcel, parcel.device, number)
        stored = parcel.stored
        if stored is None:
            raise InvariantError("a parcel that is not in storage was fetched")
        content = self._content(parcel, stored, staging, number)
        message = Fetch(self._state.dispatcher.next_id(), stored.attachment.store, content)
        self._parcels.move(parcel, message, partial(self._load, parcel, number))

    def _load(self, parcel: Parcel, number: int, completion: Completion) -> None:
        """Host to device."""
        state = self._state
        slots, staging = self._batch(parcel, parcel.device, number)
        if not self._parcels.is_good(slots, completion):
            self._parcels.lose(parcel)
            return
        plan = plan_load(state.group, transfers(state, slots, staging))
        message = Load(state.dispatcher.next_id(), plan, LayerProgress(state.group.layer_count))
        self._parcels.move(parcel, message, partial(self._loaded, parcel, number))

    def _loaded(self, parcel: Parcel, number: int, completion: Completion) -> None:
        slots, _ = self._batch(parcel, parcel.device, number)
        if not self._parcels.is_good(slots, completion):
            self._parcels.lose(parcel)
        elif self._batch(parcel, parcel.device, number + 1)[0]:
            self._fetch(parcel, number + 1)
        else:
            self._state.free_host(parcel.host)
            parcel.host, parcel.stage = {}, Stage.ARRIVED
            self._parcels.delete(parcel)
