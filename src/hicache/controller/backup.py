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
from hicache.units import HOLE, BoolArray, DeviceSlots, HostSlots, PoolName, Tier


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
        wanted = {pool: self._wanted(span, pool) for pool in self._state.pools}
        return {pool: pages for pool, pages in wanted.items() if pages.any()}

    def start(self, span: Span, after: Event | None = None) -> bool:
        """Back up what a span holds on the device only, once `after` has passed. False when the host cannot take it."""
        state = self._state
        pages = {pool: wanted for pool in state.pools if (wanted := self._wanted(span, pool)).any()}
        if not pages:
            return True
        span = state.tree.narrow(span)
        with ExitStack() as undo:
            receipt = state.tree.pin_from(span, Pin.HERE, state.starts(span, pages))
            undo.callback(state.tree.unpin, receipt)
            reservation = state.group.reserve({pool: int(wanted.sum()) for pool, wanted in pages.items()}, Tier.HOST)
            if reservation is None:
                state.counters.backup_refused_pages += max(int(wanted.sum()) for wanted in pages.values())
                return False
            undo.enter_context(reservation)
            device = {pool: DeviceSlots(state.slots(span, pool, Tier.DEVICE)[wanted]) for pool, wanted in pages.items()}
            host = {pool: HostSlots(reservation.slots[pool]) for pool in pages}
            self._submit(_Backup(span, receipt, pages, device, host), after)
            reservation.commit()
            undo.pop_all()
        return True

    def _wanted(self, span: Span, pool: PoolName) -> BoolArray:
        device = self._state.slots(span, pool, Tier.DEVICE)
        host = self._state.slots(span, pool, Tier.HOST)
        wanted: BoolArray = (device != HOLE) & (host == HOLE)
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
