"""L2 to L1: device slots at once, bytes layer by layer; a page that several requests want is loaded once."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from hicache.controller.dispatch import InFlight, Retired
from hicache.controller.state import State, spread
from hicache.coverage import Coverage
from hicache.pools import plan_load
from hicache.transfer.messages import Completion, Load
from hicache.transfer.progress import LayerProgress
from hicache.tree import Pin, Receipt, Span
from hicache.units import HOLE, BoolArray, DeviceSlots, HostSlots, Int32Array, PoolName, Tier


class Waiter(Protocol):
    """Whoever runs on pages that are still loading."""

    def load_settled(self, duplicates: Retired, whole: bool) -> None:
        """A load has settled. `duplicates`: slots that the tree did not need, held by every waiter of the load.

        `whole`: every page came. If not, whoever ran on its slots has read garbage, also where the tree has such pages
        elsewhere by now.
        """


@dataclass(eq=False, slots=True)
class LoadOp:
    """One load in flight, and the requests that wait for it."""

    span: Span
    receipt: Receipt
    pages: Mapping[PoolName, BoolArray]
    device: Mapping[PoolName, DeviceSlots]
    host: Mapping[PoolName, HostSlots]
    progress: LayerProgress
    waiters: list[Waiter] = field(default_factory=list)
    settled: bool = False


@dataclass(frozen=True, slots=True)
class LoadBack:
    """What a request got: the loads to wait for, and where the pages they bring lie on the device."""

    ops: tuple[LoadOp, ...]
    runs: Mapping[PoolName, Int32Array]


class Loads:
    """Starts, joins and settles loads."""

    def __init__(self, state: State, coverages: Mapping[PoolName, Coverage], page_size: int) -> None:
        self._state = state
        self._coverages = coverages
        self._page_size = page_size
        self._by_host_slot: dict[PoolName, dict[int, tuple[LoadOp, int]]] = {pool: {} for pool in state.pools}

    def start(self, span: Span, waiter: Waiter) -> LoadBack | None:
        """Load what is needed to resume at the end of `span` (which starts at page 0) and isn't on the device.

        None, with nothing taken, when the device has no room for it.
        """
        started = self.start_with(span, self._required(span), {}, waiter)
        return None if started is None else started[0]

    def start_with(
        self, span: Span, starts: Mapping[PoolName, int], more: Mapping[PoolName, int], waiter: Waiter
    ) -> tuple[LoadBack, Mapping[PoolName, Int32Array]] | None:
        """Load what `span` has on the host alone, in each pool from its page in `starts` on, and take `more` slots.

        All in one reservation. Returns the load and the slots taken besides; None, with nothing taken, on a shortage.
        """
        missing = {pool: self._missing(span, pool, starts[pool]) for pool in self._state.pools}
        joined, runs = self._join(span, missing)
        own = {pool: pages for pool, pages in missing.items() if pages.any()}
        begun = self._begin(span, own, more)
        if begun is None:
            return None
        op, taken = begun
        ops = joined if op is None else (*joined, op)
        for pool, slots in ({} if op is None else op.device).items():
            runs[pool][own[pool]] = slots
        for one in ops:
            one.waiters.append(waiter)
        return LoadBack(ops, runs), taken

    def leave(self, ops: tuple[LoadOp, ...], waiter: Waiter) -> None:
        """The waiter has gone; the loads go on."""
        for op in ops:
            if waiter in op.waiters:
                op.waiters.remove(waiter)

    def give_up(self, ops: tuple[LoadOp, ...], waiter: Waiter) -> None:
        """The waiter has waited long enough. Nobody joins an overdue load; its slots stay in flight until it ends."""
        self.leave(ops, waiter)
        for op in ops:
            if not op.settled:
                self._state.counters.load_failed += 1
                self._unlist(op)

    def _required(self, span: Span) -> dict[PoolName, int]:
        """Per pool, the first page that resuming at the end of a span needs."""
        return {pool: coverage.required(span.stop, self._page_size).start for pool, coverage in self._coverages.items()}

    def _missing(self, span: Span, pool: PoolName, start: int) -> BoolArray:
        device = self._state.slots(span, pool, Tier.DEVICE)
        missing: BoolArray = (device == HOLE) & (self._state.slots(span, pool, Tier.HOST) != HOLE)
        missing[:start] = False
        return missing

    def _join(
        self, span: Span, missing: Mapping[PoolName, BoolArray]
    ) -> tuple[tuple[LoadOp, ...], dict[PoolName, Int32Array]]:
        """The loads under way that bring missing pages, which are then no longer missing."""
        ops: dict[int, LoadOp] = {}
        runs = {}
        for pool, pages in missing.items():
            runs[pool] = np.full(len(pages), HOLE, dtype=np.int32)
            loading = self._by_host_slot[pool]
            if not loading:
                continue
            host = self._state.slots(span, pool, Tier.HOST)
            for page in np.flatnonzero(pages):
                found = loading.get(int(host[page]))
                if found is not None:
                    op, slot = found
                    ops[id(op)] = op
                    runs[pool][page] = slot
                    pages[page] = False
        return tuple(ops.values()), runs

    def _begin(
        self, span: Span, pages: Mapping[PoolName, BoolArray], more: Mapping[PoolName, int]
    ) -> tuple[LoadOp | None, Mapping[PoolName, Int32Array]] | None:
        state = self._state
        counts = {pool: int(wanted.sum()) for pool, wanted in pages.items()}
        demand = {pool: counts.get(pool, 0) + more.get(pool, 0) for pool in (*pages, *more)}
        with ExitStack() as undo:
            receipt = state.tree.pin_from(span, Pin.HOST, state.starts(span, pages))
            undo.callback(state.tree.unpin, receipt)
            reservation = state.group.reserve(demand, Tier.DEVICE)
            if reservation is None:
                return None
            undo.enter_context(reservation)
            taken = {pool: reservation.slots[pool][counts.get(pool, 0) :] for pool in more}
            if not pages:
                reservation.commit()
                return None, taken
            device = {pool: DeviceSlots(reservation.slots[pool][: counts[pool]]) for pool in pages}
            host = {pool: HostSlots(state.slots(span, pool, Tier.HOST)[wanted]) for pool, wanted in pages.items()}
            op = LoadOp(span, receipt, pages, device, host, LayerProgress(state.group.layer_count))
            self._submit(op)
            reservation.commit()
            undo.pop_all()
        return op, taken

    def _submit(self, op: LoadOp) -> None:
        state = self._state
        plan = plan_load(state.group, state.transfers(op.device, op.host))
        message = Load(state.dispatcher.next_id(), plan, op.progress)
        state.dispatcher.submit(message, InFlight(partial(self._settle, op), op.device, progress=op.progress))
        for pool, slots in op.host.items():
            self._by_host_slot[pool].update(
                (int(host), (op, int(device))) for host, device in zip(slots, op.device[pool], strict=True)
            )

    def _settle(self, op: LoadOp, completion: Completion) -> None:
        state = self._state
        op.settled = True
        arrived, lost = self._split(op, completion)
        state.free_device({pool: np.where(arrived[pool] == HOLE, op.device[pool], HOLE) for pool in arrived})
        duplicates = state.tree.attach(
            op.span, Tier.DEVICE, {pool: spread(op.pages[pool], run) for pool, run in arrived.items()}
        )
        self._unlist(op)
        state.tree.unpin(op.receipt)
        self._forget(op, lost)
        self._tell(op, duplicates, whole=not any(pages.any() for pages in lost.values()))

    def _unlist(self, op: LoadOp) -> None:
        for pool, slots in op.host.items():
            loading = self._by_host_slot[pool]
            for slot in slots:
                if loading.get(int(slot), (None,))[0] is op:
                    del loading[int(slot)]

    def _split(
        self, op: LoadOp, completion: Completion
    ) -> tuple[dict[PoolName, Int32Array], dict[PoolName, BoolArray]]:
        """The device slots that hold what they should (HOLE elsewhere), and the pages of the span that did not come."""
        arrived, lost = {}, {}
        for pool, slots in op.device.items():
            good = self._state.good(pool, len(slots), completion.good)
            arrived[pool] = np.where(good, slots, HOLE).astype(np.int32)
            lost[pool] = np.zeros(len(op.pages[pool]), dtype=np.bool_)
            lost[pool][op.pages[pool]] = ~good
            self._state.counters.load_pages += int(good.sum())
        return arrived, lost

    def _forget(self, op: LoadOp, lost: Mapping[PoolName, BoolArray]) -> None:
        """A host page that could not be read is not offered again."""
        if not any(pages.any() for pages in lost.values()):
            return
        state = self._state
        state.counters.load_failed += 1
        for pool, pages in lost.items():
            for page in np.flatnonzero(pages):
                span = Span(op.span.node, op.span.start + int(page), op.span.start + int(page) + 1)
                state.quarantine(state.tree.detach(span, Tier.HOST, [pool]))

    def _tell(self, op: LoadOp, duplicates: Mapping[PoolName, Int32Array], *, whole: bool) -> None:
        waiters, op.waiters = op.waiters, []
        if not waiters:
            self._state.free_device(duplicates)
        retired = Retired(duplicates, holders=len(waiters))
        for waiter in waiters:
            waiter.load_settled(retired, whole)
