"""L2 to L3: pages are stored root first, each once per attachment; their host copy stays pinned meanwhile."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hicache.controller.dispatch import InFlight
from hicache.controller.rates import StoreRates
from hicache.controller.state import State
from hicache.coverage import Full
from hicache.keys import KEY_BYTES
from hicache.storage import PageStore
from hicache.transfer.messages import Completion, Store, StoredPages
from hicache.tree import Pin, Receipt, Span
from hicache.units import HOLE, BoolArray, HostSlots, PoolName, Tier


@dataclass(frozen=True, slots=True)
class Attachment:
    """A page store in use. Stored marks belong to one attachment, told by its `epoch`."""

    store: PageStore
    epoch: int
    rates: StoreRates = field(default_factory=StoreRates)


@dataclass(frozen=True, slots=True)
class _Batch:
    span: Span
    receipt: Receipt
    attachment: Attachment
    pages: Mapping[PoolName, BoolArray]
    host: Mapping[PoolName, HostSlots]


class Stores:
    """Starts and settles stores. A page is in at most one store at a time."""

    def __init__(self, state: State, batch_pages: int) -> None:
        self._state = state
        self._batch_pages = batch_pages
        self._full = [pool for pool in state.pools if isinstance(state.group.get_entry(pool).coverage, Full)]
        self._busy: dict[PoolName, BoolArray] = {
            pool: np.zeros(state.group.get_pool(pool).slots, dtype=np.bool_) for pool in state.pools
        }

    def start(self, span: Span, attachment: Attachment) -> None:
        """Store what a span that starts at page 0 holds on the host and `attachment` has not yet taken."""
        wanted = {pool: self._wanted(span, pool, attachment.epoch) for pool in self._state.pools}
        reachable = self._reachable(span, attachment.epoch, wanted)
        for pages in wanted.values():
            pages[reachable:] = False
        any_pool = np.logical_or.reduce(list(wanted.values()))
        positions = np.flatnonzero(any_pool)
        for first in range(0, len(positions), self._batch_pages):
            batch = positions[first : first + self._batch_pages]
            self._submit(Span(span.node, int(batch[0]), int(batch[-1]) + 1), attachment, wanted)

    def _wanted(self, span: Span, pool: PoolName, epoch: int) -> BoolArray:
        host = self._state.slots(span, pool, Tier.HOST)
        wanted: BoolArray = self._state.tree.unstored(span, pool, epoch) & (host != HOLE)
        wanted[wanted] = ~self._busy[pool][host[wanted]]
        return wanted

    def _reachable(self, span: Span, epoch: int, wanted: Mapping[PoolName, BoolArray]) -> int:
        """Pages up to the first that is neither stored nor about to be: behind it, no page could be found again."""
        for pool in self._full:
            host = self._state.slots(span, pool, Tier.HOST)
            lost = self._state.tree.unstored(span, pool, epoch) & (host == HOLE)
            if lost.any():
                return int(lost.argmax())
        return span.stop

    def _submit(self, span: Span, attachment: Attachment, wanted: Mapping[PoolName, BoolArray]) -> None:
        state = self._state
        span = state.tree.narrow(span)
        pages = {pool: mask[span.start : span.stop] for pool, mask in wanted.items()}
        host = {pool: HostSlots(state.slots(span, pool, Tier.HOST)[mask]) for pool, mask in pages.items() if mask.any()}
        with ExitStack() as undo:
            receipt = state.tree.pin_span(span, Pin.HOST, tuple(host))
            undo.callback(state.tree.unpin, receipt)
            batch = _Batch(span, receipt, attachment, pages, host)
            message = Store(state.dispatcher.next_id(), attachment.store, self._content(batch))
            elsewhere = {
                member: len(slots)
                for pool, slots in host.items()
                for member in state.members(pool)
                if not state.writes(member)
            }
            state.dispatcher.submit(message, InFlight(partial(self._settle, batch), elsewhere=elsewhere))
            undo.pop_all()
        for pool, slots in host.items():
            self._busy[pool][slots] = True

    def _content(self, batch: _Batch) -> tuple[StoredPages, ...]:
        state = self._state
        namespace = state.tree.namespace(batch.span)
        keys = state.tree.page_keys(Span(batch.span.node, 0, batch.span.stop))
        first = batch.span.start * KEY_BYTES
        parent = keys[first - KEY_BYTES : first] if first else None
        content = []
        for pool, slots in batch.host.items():
            for member in state.members(pool):
                if not state.writes(member):
                    continue
                chain = state.storage_keys(namespace, member, parent, keys[first:])
                taken = tuple(chain[page] for page in np.flatnonzero(batch.pages[pool]))
                content.append(StoredPages(member, taken, state.views(member, slots)))
        return tuple(content)

    def _settle(self, batch: _Batch, completion: Completion) -> None:
        state = self._state
        for pool, slots in batch.host.items():
            self._busy[pool][slots] = False
            good = state.good(pool, len(slots), completion.good)
            state.counters.store_pages += int(good.sum())
            state.counters.store_failed_pages += int((~good).sum())
            stored = batch.pages[pool].copy()
            stored[batch.pages[pool]] = good
            state.tree.mark_stored(batch.span, pool, batch.attachment.epoch, stored)
        state.tree.unpin(batch.receipt)
