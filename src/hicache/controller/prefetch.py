"""L3 to L2 in the background: a request asks, storage is queried, what it has is fetched; a deadline always holds."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hicache.controller.dispatch import InFlight
from hicache.controller.fetches import Fetches, FetchOp, Prefix
from hicache.controller.state import State
from hicache.controller.stores import Attachment
from hicache.coverage import Coverage, longest_usable
from hicache.keys import TOKEN_BYTES
from hicache.transfer.messages import Completion, Query
from hicache.tree import TreeMatch
from hicache.units import HOLE, BoolArray, PoolName, Tier

ATTEMPTS = 2
"""A fetch that came short is planned once more for the best remaining length."""


@dataclass(eq=False, slots=True)
class Prefetch:
    """A request's ticket. `done` says that waiting longer brings nothing."""

    prefix: Prefix
    deadline_s: float
    done: bool = False
    attempts: int = 0
    ops: list[FetchOp] = field(default_factory=list)

    def fetched(self, pages: int) -> BoolArray:
        """Which of the first `pages` pages came from storage for this ticket."""
        came = np.zeros(pages, dtype=np.bool_)
        for op in self.ops:
            shared = min(pages, self.prefix.shared_pages(op.prefix))
            came[:shared] |= op.arrived[:shared]
        return came


class Prefetches:
    """Starts, joins and ends prefetches."""

    def __init__(self, state: State, fetches: Fetches, coverages: Mapping[PoolName, Coverage], page_size: int) -> None:
        self._state = state
        self._fetches = fetches
        self._coverages = coverages
        self._page_size = page_size
        self._active: list[Prefetch] = []

    def start(
        self, namespace: bytes, tokens: bytes, pages: int, deadline_s: float, attachment: Attachment | None
    ) -> Prefetch:
        """Ask storage for what the first `pages` pages lack in memory, until the clock says `deadline_s`."""
        if attachment is None or pages == 0:
            return Prefetch(Prefix(namespace, b"", b""), deadline_s, done=True)
        ticket = Prefetch(self._prefix(namespace, tokens, pages), deadline_s)
        self._state.counters.prefetches += 1
        self._active.append(ticket)
        self._query(ticket, attachment)
        return ticket

    def cancel(self, ticket: Prefetch) -> None:
        """Nobody waits for it any more. What is under way still lands in the tree."""
        self._end(ticket)

    def expire(self, now_s: float) -> None:
        """End the tickets whose deadline has passed."""
        for ticket in [one for one in self._active if now_s >= one.deadline_s]:
            self._state.counters.prefetch_deadlines += 1
            self._end(ticket)

    def end_all(self) -> None:
        """End every ticket: the cache is closing, or storage was detached."""
        for ticket in list(self._active):
            self._end(ticket)

    def end_in(self, namespaces: Collection[bytes]) -> None:
        """End the tickets of some namespaces: these were flushed."""
        for ticket in [one for one in self._active if one.prefix.namespace in namespaces]:
            self._end(ticket)

    def _end(self, ticket: Prefetch) -> None:
        ticket.done = True
        if ticket in self._active:
            self._active.remove(ticket)

    def _query(self, ticket: Prefetch, attachment: Attachment) -> None:
        """Ask which of the pages that memory lacks are in storage."""
        state = self._state
        prefix = ticket.prefix
        missing = {pool: ~pages for pool, pages in self._resident(self._match(prefix), prefix.pages).items()}
        if not any(pages.any() for pages in missing.values()):
            self._end(ticket)
            return
        keys = {}
        for pool, pages in missing.items():
            for member in state.members(pool):
                chain = state.storage_keys(prefix.namespace, member, None, prefix.keys)
                keys[member] = tuple(chain[page] for page in np.flatnonzero(pages))
        message = Query(state.dispatcher.next_id(), attachment.store, keys)
        state.dispatcher.submit(message, InFlight(partial(self._answered, ticket, attachment, missing)))

    def _answered(
        self, ticket: Prefetch, attachment: Attachment, asked: Mapping[PoolName, BoolArray], completion: Completion
    ) -> None:
        if ticket.done:
            return
        state = self._state
        match = self._match(ticket.prefix)
        resident = self._resident(match, ticket.prefix.pages)
        offered = {}
        for pool, missing in asked.items():
            offered[pool] = np.zeros(len(missing), dtype=np.bool_)
            offered[pool][missing] = state.good(pool, int(missing.sum()), completion.good)
        length = self._affordable(resident, offered)
        if length <= match.usable_pages:
            self._end(ticket)
            return
        wanted = {pool: self._lacking(pool, pages, length)[:length] for pool, pages in resident.items()}
        self._fetch(ticket, attachment, match, wanted)

    def _fetch(
        self, ticket: Prefetch, attachment: Attachment, match: TreeMatch, wanted: Mapping[PoolName, BoolArray]
    ) -> None:
        """Fetch what is lacking; where others fetch a part of it, wait for them first and then ask again."""
        op = self._fetches.under_way(ticket.prefix, wanted)
        if op is None:
            ticket.attempts += 1
            op = self._fetches.start(ticket.prefix, match, wanted, attachment)
        if op is None:
            self._end(ticket)
            return
        ticket.ops.append(op)
        op.on_end.append(partial(self._landed, ticket, attachment, op))

    def _landed(self, ticket: Prefetch, attachment: Attachment, op: FetchOp) -> None:
        if ticket.done:
            return
        complete = op.prefix is ticket.prefix and op.whole
        if complete or ticket.attempts >= ATTEMPTS:
            self._end(ticket)
        else:
            self._query(ticket, attachment)

    def _prefix(self, namespace: bytes, tokens: bytes, pages: int) -> Prefix:
        """The first `pages` pages, with the tokens after them that are part of the last one's identity."""
        tree = self._state.tree
        match = tree.match(namespace, tokens, pages)
        known = tree.page_keys(tree.span(match, 0, match.pages))
        ends = (pages * self._page_size + tree.lookahead_tokens) * TOKEN_BYTES
        return Prefix(namespace, tokens[:ends], known + tree.keys_beyond(match, tokens, pages))

    def _match(self, prefix: Prefix) -> TreeMatch:
        return self._state.tree.match(prefix.namespace, prefix.tokens, prefix.pages)

    def _resident(self, match: TreeMatch, pages: int) -> dict[PoolName, BoolArray]:
        """Which pages each pool holds in memory, in whatever tier."""
        tree = self._state.tree
        resident = {}
        for pool in self._state.pools:
            present = np.zeros(pages, dtype=np.bool_)
            for tier in (Tier.DEVICE, Tier.HOST):
                present[: match.pages] |= tree.slots(match, pool, tier, 0, match.pages) != HOLE
            resident[pool] = present
        return resident

    def _lacking(self, pool: PoolName, resident: BoolArray, length: int) -> BoolArray:
        """The pages that `pool` must still get so that a prefix of `length` pages can be resumed."""
        required = self._coverages[pool].required(length, self._page_size)
        lacking: BoolArray = ~resident
        lacking[: required.start] = False
        lacking[required.stop :] = False
        return lacking

    def _affordable(self, resident: Mapping[PoolName, BoolArray], offered: Mapping[PoolName, BoolArray]) -> int:
        """The longest length that memory and storage can resume at and whose missing pages the host can take."""
        state = self._state
        room = {pool: state.room(pool, Tier.HOST) for pool in resident}
        length = min(len(pages) for pages in resident.values())
        while length > 0:
            present = [(self._coverages[pool], (resident[pool] | offered[pool])[:length]) for pool in resident]
            length = longest_usable(present, self._page_size)
            over = max(int(self._lacking(pool, resident[pool], length).sum()) - room[pool] for pool in resident)
            if over <= 0:
                return length
            state.counters.fetch_refused_pages += over
            length = max(0, length - over)
        return 0
