"""L1 to L2: pages that have no host copy get one; their device copy stays pinned until the transfer has settled."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from hicache.controller.dispatch import InFlight
from hicache.controller.state import State, spread
from hicache.pools import plan_backup
from hicache.transfer.messages import Backup, Completion, Event
from hicache.tree import Pin, Receipt, Span
from hicache.units import HOLE, BoolArray, DeviceSlots, HostSlots, Int32Array, PoolName, Tier


@dataclass(frozen=True, slots=True)
class _Backup:
    span: Span
    receipt: Receipt
    pages: Mapping[PoolName, BoolArray]
    device: Mapping[PoolName, DeviceSlots]
    host: Mapping[PoolName, HostSlots]


class Backups:
    """Starts and settles backups. A page is in at most one backup at a time."""

    def __init__(self, state: State, on_settled: Callable[[Span], None]) -> None:
        self._state = state
        self._on_settled = on_settled
        self._running = 0
        self._pages = dict.fromkeys(state.pools, 0)
        self._busy: dict[PoolName, BoolArray] = {
            pool: np.zeros(state.group.get_entry(pool).device_pool.slots, dtype=np.bool_) for pool in state.pools
        }

    @property
    def running(self) -> int:
        """How many backups are in flight."""
        return self._running

    def pages_running(self, pool: PoolName) -> int:
        """How many pages of a pool are being copied."""
        return self._pages[pool]

    def lacking(self, span: Span) -> dict[PoolName, BoolArray]:
        """Per pool that has any, which pages of a span are on the device only, and not on their way."""
        wanted = {pool: self._wanted(span, pool, span.start) for pool in self._state.pools}
        return {pool: pages for pool, pages in wanted.items() if pages.any()}

    def start(self, span: Span, after: Event | None = None) -> bool:
        """Back up what a span holds on the device only, once `after` has passed. False when the host cannot take it."""
        return self.start_with(span, dict.fromkeys(self._state.pools, span.start), {}, after) is not None

    def start_with(
        self, span: Span, starts: Mapping[PoolName, int], more: Mapping[PoolName, int], after: Event | None
    ) -> Mapping[PoolName, Int32Array] | None:
        """Back up a span, in each pool from its absolute page in `starts` on, and take `more` host slots.

        All in one reservation. Returns the slots taken besides; None, with nothing taken, when the host is full.
        """
        state = self._state
        wanted = {pool: self._wanted(span, pool, starts[pool]) for pool in state.pools}
        pages = {pool: found for pool, found in wanted.items() if found.any()}
        counts = {pool: int(found.sum()) for pool, found in pages.items()}
        if not pages and not more:
            return {}
        with state.tree.asking(span), ExitStack() as undo:
            if pages:
                span = state.tree.narrow(span)
            receipt = state.tree.pin_from(span, Pin.HERE, state.starts(span, pages))
            undo.callback(state.tree.unpin, receipt)
            demand = {pool: counts.get(pool, 0) + more.get(pool, 0) for pool in (*pages, *more)}
            reservation = state.group.reserve(demand, Tier.HOST)
            if reservation is None:
                state.counters.backup_refused_pages += max(counts.values(), default=0)
                return None
            undo.enter_context(reservation)
            taken = {pool: reservation.slots[pool][counts.get(pool, 0) :] for pool in more}
            if pages:
                device = {pool: DeviceSlots(state.slots(span, pool, Tier.DEVICE)[pages[pool]]) for pool in pages}
                host = {pool: HostSlots(reservation.slots[pool][: counts[pool]]) for pool in pages}
                self._submit(_Backup(span, receipt, pages, device, host), after)
                undo.pop_all()
            reservation.commit()
        return taken

    def _wanted(self, span: Span, pool: PoolName, start: int) -> BoolArray:
        device = self._state.slots(span, pool, Tier.DEVICE)
        host = self._state.slots(span, pool, Tier.HOST)
        wanted: BoolArray = (device != HOLE) & (host == HOLE)
        wanted[: start - span.start] = False
        wanted[wanted] = ~self._busy[pool][device[wanted]]
        return wanted

    def _submit(self, backup: _Backup, after: Event | None) -> None:
        state = self._state
        plan = plan_backup(state.group, state.transfers(backup.device, backup.host))
        message = Backup(state.dispatcher.next_id(), plan, after)
        state.dispatcher.submit(message, InFlight(partial(self._settle, backup), host_slots=backup.host))
        self._mark(backup, busy=True)
        self._running += 1

    def _mark(self, backup: _Backup, *, busy: bool) -> None:
        for pool, slots in backup.device.items():
            self._busy[pool][slots] = busy
            self._pages[pool] += len(slots) if busy else -len(slots)

    def _settle(self, backup: _Backup, completion: Completion) -> None:
        state = self._state
        self._running -= 1
        self._mark(backup, busy=False)
        runs = {}
        for pool, slots in backup.host.items():
            good = state.good(pool, len(slots), completion.good)
            state.free_host({pool: slots[~good]})
            state.counters.backup_pages += int(good.sum())
            state.counters.backup_failed_pages += int((~good).sum())
            runs[pool] = spread(backup.pages[pool], np.where(good, slots, HOLE).astype(np.int32))
        state.free_host(state.tree.attach(backup.span, Tier.HOST, runs))
        state.tree.unpin(backup.receipt)
        self._on_settled(backup.span)
