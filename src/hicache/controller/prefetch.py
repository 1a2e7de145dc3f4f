"""L3 to L2 in the background: a request asks, storage is queried, what it has is fetched; a deadline always holds."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hicache.controller.dispatch import InFlight
from hicache.controller.fetches import Fetches, FetchOp, Prefix
from hicache.controller.lifts import Lifts
from hicache.controller.patience import Patience, patience_s
from hicache.controller.state import State
from hicache.controller.stores import Attachment
from hicache.coverage import Coverage, longest_usable
from hicache.keys import TOKEN_BYTES
from hicache.transfer.messages import Completion, Query
from hicache.tree import Span, TreeMatch
from hicache.units import HOLE, BoolArray, PoolName, Tier

ATTEMPTS = 2
"""A fetch that came short is planned once more for the best remaining length."""


@dataclass(eq=False, slots=True)
class Prefetch:
    """A request's ticket. `ended`: nothing more is begun for it, since all has come, or its deadline has."""

    prefix: Prefix
    deadline_s: float
    patience: Patience
    ended: bool = False
    attempts: int = 0
    refused_pages: int = 0
    """Of what storage has of it, those for which the host has no room at the same time."""
    lifted_pages: int = 0
    """So many of its first pages went on to the device, to make room."""
    ops: list[FetchOp] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether the request should wait no longer."""
        return self.ended or not self.patience.waits

    def fetched(self, pages: int) -> BoolArray:
        """Which of the first `pages` pages came from storage for this ticket."""
        came = np.zeros(pages, dtype=np.bool_)
        for op in self.ops:
            shared = min(pages, self.prefix.shared_pages(op.prefix))
            came[:shared] |= op.arrived[:shared]
        return came


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question to storage, put at `since_s`: which of the pages that are `missing` in memory are there."""

    attachment: Attachment
    since_s: float
    missing: Mapping[PoolName, BoolArray]


class Prefetches:
    """Starts, joins and ends prefetches."""

    def __init__(
        self,
        state: State,
        fetches: Fetches,
        lifts: Lifts,
        coverages: Mapping[PoolName, Coverage],
        page_size: int,
        now: Callable[[], float],
    ) -> None:
        self._state = state
        self._fetches = fetches
        self._lifts = lifts
        self._coverages = coverages
        self._page_size = page_size
        self._now = now
        self.tokens_per_s: float | None = None
        """What the engine computes, as it was told last."""
        self._active: list[Prefetch] = []

    def start(
        self, namespace: bytes, tokens: bytes, pages: int, patience: Patience, attachment: Attachment | None
    ) -> Prefetch:
        """Ask storage for what the first `pages` pages lack in memory, for as long as `patience` lasts."""
        now_s = self._now()
        if attachment is None or pages == 0:
            return Prefetch(Prefix(namespace, b"", b""), now_s, patience, ended=True)
        ticket = Prefetch(self._prefix(namespace, tokens, pages), now_s + patience.limit_s(pages), patience)
        self._state.counters.prefetches += 1
        self._active.append(ticket)
        self._query(ticket, attachment)
        return ticket

    def cancel(self, ticket: Prefetch) -> None:
        """Nobody waits for it any more. What is under way still lands in the tree."""
        self._end(ticket)

    def step(self, now_s: float) -> None:
        """End the tickets whose deadline has passed, and go on with those that wait for room on the device."""
        for ticket in [one for one in self._active if now_s >= one.deadline_s]:
            self._state.counters.prefetch_deadlines += 1
            self._end(ticket)
        self._lifts.step()

    def end_all(self) -> None:
        """End every ticket: the cache is closing, or storage was detached."""
        for ticket in list(self._active):
            self._end(ticket)

    def end_in(self, namespaces: Collection[bytes]) -> None:
        """End the tickets of some namespaces: these were flushed."""
        for ticket in [one for one in self._active if one.prefix.namespace in namespaces]:
            self._end(ticket)

    def _end(self, ticket: Prefetch) -> None:
        ticket.ended = True
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
        asked = _Asked(attachment, self._now(), missing)
        state.dispatcher.submit(message, InFlight(partial(self._answered, ticket, asked)))

    def _answered(self, ticket: Prefetch, asked: _Asked, completion: Completion) -> None:
        asked.attachment.rates.answered(self._now() - asked.since_s)
        if ticket.ended:
            return
        state = self._state
        match = self._match(ticket.prefix)
        resident = self._resident(match, ticket.prefix.pages)
        offered = {}
        for pool, missing in asked.missing.items():
            offered[pool] = np.zeros(len(missing), dtype=np.bool_)
            offered[pool][missing] = state.good(pool, int(missing.sum()), completion.good)
        with state.tree.asking(ticket.prefix.namespace):
            length, ticket.refused_pages = self._affordable(resident, offered)
        if length <= match.usable_pages:
            self._end_short(ticket)
            return
        wanted = {pool: self._lacking(pool, pages, length)[:length] for pool, pages in resident.items()}
        if self._pays(ticket, asked.attachment, (length - match.usable_pages) * self._page_size, wanted):
            self._fetch(ticket, asked.attachment, match, wanted)
        else:
            state.counters.prefetch_left += 1
            self._end(ticket)

    def _pays(
        self, ticket: Prefetch, attachment: Attachment, tokens: int, wanted: Mapping[PoolName, BoolArray]
    ) -> bool:
        """Whether to fetch these pages, for so many tokens more. By price, the ticket's deadline comes nearer."""
        if ticket.patience.policy != "cost-aware":
            return True
        now_s = self._now()
        size_bytes = self._state.size_bytes({pool: int(pages.sum()) for pool, pages in wanted.items()})
        prices = attachment.rates.prices(now_s, self.tokens_per_s)
        wait_s = patience_s(prices, tokens, attachment.rates.waiting_bytes + size_bytes)
        if wait_s is not None:
            ticket.deadline_s = min(ticket.deadline_s, now_s + wait_s)
        return wait_s != 0.0

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
        if ticket.ended:
            return
        complete = op.prefix is ticket.prefix and op.whole
        if complete and ticket.refused_pages:
            self._lifts.start(partial(self._to_lift, ticket), partial(self._lifted, ticket, attachment))
        elif complete or ticket.attempts >= ATTEMPTS:
            self._end(ticket)
        else:
            self._query(ticket, attachment)

    def _end_short(self, ticket: Prefetch) -> None:
        self._state.counters.fetch_refused_pages += ticket.refused_pages
        self._end(ticket)

    def _to_lift(self, ticket: Prefetch) -> Span | None:
        """What has come so far. None when the ticket has ended."""
        if ticket.ended:
            return None
        match = self._match(ticket.prefix)
        return self._state.tree.span(match, 0, match.usable_pages)

    def _lifted(self, ticket: Prefetch, attachment: Attachment, done: bool) -> None:
        """Go on with what comes after it, unless nothing was won: pages of the prompt may have given way to others."""
        if ticket.ended:
            return
        pages = self._match(ticket.prefix).device_pages
        if not done or pages <= ticket.lifted_pages:
            self._end_short(ticket)
            return
        ticket.lifted_pages, ticket.attempts = pages, 0
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

    def _affordable(
        self, resident: Mapping[PoolName, BoolArray], offered: Mapping[PoolName, BoolArray]
    ) -> tuple[int, int]:
        """The longest length that memory and storage can resume at and whose missing pages the host can take.

        And how many pages it was cut by for the latter's sake.
        """
        state = self._state
        room = {pool: state.room(pool, Tier.HOST) for pool in resident}
        length, refused = min(len(pages) for pages in resident.values()), 0
        while length > 0:
            present = [(self._coverages[pool], (resident[pool] | offered[pool])[:length]) for pool in resident]
            length = longest_usable(present, self._page_size)
            over = max(int(self._lacking(pool, resident[pool], length).sum()) - room[pool] for pool in resident)
            if over <= 0:
                return length, refused
            refused += over
            length = max(0, length - over)
        return 0, refused
