"""The fetches under a prefetch: reserved outside the tree, joined per page, inserted in order as batches settle."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hicache.controller.dispatch import InFlight
from hicache.controller.state import State, present, spread
from hicache.controller.stores import Attachment
from hicache.coverage import Full
from hicache.keys import KEY_BYTES, TOKEN_BYTES
from hicache.transfer.messages import Completion, Fetch, StoredPages
from hicache.tree import Pin, Receipt, TreeMatch
from hicache.units import HOLE, BoolArray, HostSlots, Int32Array, PageRange, PoolName, Tier


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt's full pages: their tokens (little-endian uint32), with those looked ahead to, and a key per page."""

    namespace: bytes
    tokens: bytes
    keys: bytes

    @property
    def pages(self) -> int:
        """How many full pages it has."""
        return len(self.keys) // KEY_BYTES

    def key(self, page: int) -> bytes:
        """The key of one page."""
        return self.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]

    def shared_pages(self, other: "Prefix") -> int:
        """How many pages two prefixes have in common."""
        least = min(self.pages, other.pages)
        return next((page for page in range(least) if self.key(page) != other.key(page)), least)


@dataclass(eq=False, slots=True)
class FetchOp:
    """One fetch. `slots`: the host slots it reserved, by page of the prefix; `arrived`: the pages it brought."""

    prefix: Prefix
    attachment: Attachment
    slots: Mapping[PoolName, Int32Array]
    receipts: list[Receipt]
    linked_pages: int
    batches: list[PageRange]
    arrived: BoolArray
    settled: dict[PageRange, Mapping[PoolName, BoolArray]] = field(default_factory=dict)
    cut: int | None = None
    whole: bool = True
    on_end: list[Callable[[], None]] = field(default_factory=list)

    def pages(self, batch: PageRange) -> list[int]:
        """The pages of a batch that are fetched, in whatever pool: those between them are there already."""
        taken = [run[batch.start : batch.stop] != HOLE for run in self.slots.values()]
        return [batch.start + int(page) for page in np.flatnonzero(np.logical_or.reduce(taken))]


class Fetches:
    """Starts and settles fetches. A page is in at most one fetch at a time."""

    def __init__(self, state: State, batch_pages: int, page_size: int, now: Callable[[], float]) -> None:
        self._state = state
        self._now = now
        self._batch_pages = batch_pages
        self._page_bytes = page_size * TOKEN_BYTES
        self._lookahead_bytes = state.tree.lookahead_tokens * TOKEN_BYTES
        self._by_key: dict[bytes, FetchOp] = {}
        self._ops: list[FetchOp] = []
        self._full = [pool for pool in state.pools if isinstance(state.group.get_entry(pool).coverage, Full)]

    def under_way(self, prefix: Prefix, wanted: Mapping[PoolName, BoolArray]) -> FetchOp | None:
        """The first fetch of others that brings a page of these."""
        if not self._by_key:
            return None
        pages = np.flatnonzero(np.logical_or.reduce(list(wanted.values())))
        return next((op for page in pages if (op := self._by_key.get(prefix.key(int(page)))) is not None), None)

    def start(
        self, prefix: Prefix, match: TreeMatch, wanted: Mapping[PoolName, BoolArray], attachment: Attachment
    ) -> FetchOp | None:
        """Fetch the pages that are set in `wanted` (bool per page), to resume a prompt with `match` at the end of them.

        None, with nothing taken, when the host is full.
        """
        state = self._state
        length = len(next(iter(wanted.values())))
        known = state.tree.span(match, 0, min(match.pages, length))
        demand = {pool: int(pages.sum()) for pool, pages in wanted.items() if pages.any()}
        with state.tree.asking(prefix.namespace), ExitStack() as undo:
            receipt = state.tree.pin_from(known, Pin.SOMEWHERE, self._needed_from(length))
            undo.callback(state.tree.unpin, receipt)
            reservation = state.group.reserve(demand, Tier.HOST)
            if reservation is None:
                return None
            undo.enter_context(reservation)
            op = FetchOp(
                prefix,
                attachment,
                {pool: spread(wanted[pool], reservation.slots[pool]) for pool in demand},
                [receipt],
                known.stop,
                list(self._cut_batches(wanted)),
                np.zeros(prefix.pages, dtype=np.bool_),
            )
            for batch in op.batches:
                self._submit(op, batch)
            reservation.commit()
            undo.pop_all()
        self._ops.append(op)
        return op

    def drop_in(self, namespaces: Collection[bytes]) -> None:
        """What is under way of some namespaces is of no use any more: it does not get into the tree."""
        for op in self._ops:
            if op.prefix.namespace in namespaces:
                op.cut, op.whole = 0, False

    def _needed_from(self, length: int) -> dict[PoolName, int]:
        """Per pool, the first page that resuming after `length` pages needs."""
        group, page_size = self._state.group, self._page_bytes // TOKEN_BYTES
        return {pool: group.get_entry(pool).coverage.required(length, page_size).start for pool in self._state.pools}

    @property
    def running(self) -> int:
        """How many fetches are under way."""
        return len(self._ops)

    def parked_slots(self) -> Iterator[Mapping[PoolName, Int32Array]]:
        """Host slots of batches that have arrived and wait for an earlier one."""
        for op in self._ops:
            for batch in op.settled:
                yield {pool: present(run[batch.start : batch.stop]) for pool, run in op.slots.items()}

    def _cut_batches(self, wanted: Mapping[PoolName, BoolArray]) -> Iterator[PageRange]:
        pages = np.flatnonzero(np.logical_or.reduce(list(wanted.values())))
        for first in range(0, len(pages), self._batch_pages):
            batch = pages[first : first + self._batch_pages]
            yield PageRange(int(batch[0]), int(batch[-1]) + 1)

    def _submit(self, op: FetchOp, batch: PageRange) -> None:
        state = self._state
        prefix = op.prefix
        parent = prefix.key(batch.start - 1) if batch.start else None
        keys = prefix.keys[batch.start * KEY_BYTES : batch.stop * KEY_BYTES]
        content, host = [], {}
        for pool, run in op.slots.items():
            taken = run[batch.start : batch.stop] != HOLE
            if not taken.any():
                continue
            host[pool] = HostSlots(run[batch.start : batch.stop][taken])
            for member in state.members(pool):
                chain = state.storage_keys(prefix.namespace, member, parent, keys)
                chosen = tuple(chain[page] for page in np.flatnonzero(taken))
                content.append(StoredPages(member, chosen, state.views(member, host[pool])))
        for page in op.pages(batch):
            self._by_key[prefix.key(page)] = op
        message = Fetch(state.dispatcher.next_id(), op.attachment.store, tuple(content))
        state.dispatcher.submit(message, InFlight(partial(self._settle, op, batch), host_slots=host))
        op.attachment.rates.began(state.size_bytes({pool: len(slots) for pool, slots in host.items()}), self._now())

    def _settle(self, op: FetchOp, batch: PageRange, completion: Completion) -> None:
        state = self._state
        good, asked = {}, {}
        for pool, run in op.slots.items():
            taken = run[batch.start : batch.stop] != HOLE
            asked[pool] = int(taken.sum())
            good[pool] = np.zeros(len(batch), dtype=np.bool_)
            good[pool][taken] = state.good(pool, asked[pool], completion.good)
        came = {pool: int(pages.sum()) for pool, pages in good.items()}
        op.attachment.rates.ended(state.size_bytes(asked), state.size_bytes(came), self._now())
        op.settled[batch] = good
        while op.batches and op.batches[0] in op.settled:
            first = op.batches.pop(0)
            self._land(op, first, op.settled.pop(first))
        if not op.batches:
            self._end(op)

    def _land(self, op: FetchOp, batch: PageRange, good: Mapping[PoolName, BoolArray]) -> None:
        """Put a batch into the tree, up to the first page that a prefix can't do without and that did not come."""
        state = self._state
        self._count(op, batch, good)
        keep = self._keep(op, batch, good)
        runs = {}
        for pool, run in op.slots.items():
            slots = run[batch.start : batch.stop]
            runs[pool] = np.where(good[pool] & keep, slots, HOLE).astype(np.int32)
            state.free_host({pool: np.where(runs[pool] == HOLE, slots, HOLE)})
        for page in op.pages(batch):
            del self._by_key[op.prefix.key(page)]
        self._forget(op, batch, good)
        if keep.any():
            self._insert(op, PageRange(batch.start, batch.start + int(keep.sum())), runs)

    def _count(self, op: FetchOp, batch: PageRange, good: Mapping[PoolName, BoolArray]) -> None:
        for pool, run in op.slots.items():
            asked = run[batch.start : batch.stop] != HOLE
            self._state.counters.fetch_pages += int(good[pool].sum())
            failed = int((asked & ~good[pool]).sum())
            self._state.counters.fetch_failed_pages += failed
            op.whole = op.whole and failed == 0

    def _keep(self, op: FetchOp, batch: PageRange, good: Mapping[PoolName, BoolArray]) -> BoolArray:
        for pool in self._full:
            if pool not in op.slots:
                continue
            lost = (op.slots[pool][batch.start : batch.stop] != HOLE) & ~good[pool]
            if lost.any():
                first = batch.start + int(lost.argmax())
                op.cut = first if op.cut is None else min(op.cut, first)
        pages = np.arange(batch.start, batch.stop)
        return np.asarray(pages < (op.cut if op.cut is not None else batch.stop))

    def _forget(self, op: FetchOp, batch: PageRange, good: Mapping[PoolName, BoolArray]) -> None:
        """What did not come is not in storage, whatever the tree remembers: it will be stored when it comes by."""
        tree = self._state.tree
        lost = {pool: (run[batch.start : batch.stop] != HOLE) & ~good[pool] for pool, run in op.slots.items()}
        if not any(pages.any() for pages in lost.values()):
            return
        match = tree.match(op.prefix.namespace, op.prefix.tokens, batch.stop)
        span = tree.span(match, min(batch.start, match.pages), match.pages)
        for pool, pages in lost.items():
            tree.unmark_stored(span, pool, op.attachment.epoch, pages[: len(span)])

    def _insert(self, op: FetchOp, pages: PageRange, runs: Mapping[PoolName, Int32Array]) -> None:
        state = self._state
        first = min(pages.start, op.linked_pages)
        padded = {}
        for pool, run in runs.items():
            padded[pool] = np.full(pages.stop - first, HOLE, dtype=np.int32)
            padded[pool][pages.start - first :] = run[: len(pages)]
        tokens = op.prefix.tokens[: pages.stop * self._page_bytes + self._lookahead_bytes]
        result = state.tree.insert(op.prefix.namespace, tokens, first, padded, Tier.HOST)
        state.free_host(result.duplicates)
        if result.match.pages <= pages.start:
            return
        span = state.tree.span(result.match, pages.start, min(pages.stop, result.match.pages))
        op.receipts.append(state.tree.pin_span(span, Pin.SOMEWHERE))
        op.linked_pages = max(op.linked_pages, span.stop)
        for pool, run in runs.items():
            came = run[: len(span)] != HOLE
            state.tree.mark_stored(span, pool, op.attachment.epoch, came)
            op.arrived[span.start : span.stop] |= came

    def _end(self, op: FetchOp) -> None:
        self._ops.remove(op)
        for receipt in op.receipts:
            self._state.tree.unpin(receipt)
        for callback in op.on_end:
            callback()
