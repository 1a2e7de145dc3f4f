"""A match is a request's account: what it pins, waits for and was lent. Releasing it gives all of it back."""

from collections.abc import Mapping

from hicache.cache.account import Account, Lookup
from hicache.cache.lent import Lent
from hicache.controller import LoadBack
from hicache.controller.dispatch import Retired
from hicache.controller.parcels import Parcel, Return, Shared
from hicache.controller.state import State
from hicache.transfer import Event
from hicache.tree import InsertResult, Pin, Receipt, Span, TreeMatch
from hicache.units import HOLE, DeviceSlots, Int32Array, PoolName, Tier


class Match(Account):
    """Made by `match_prefix`, extended by `load_back`, `allocate` and `insert`, ended by `release`.

    `length_tokens` is how far the account's slots reach: the usable prefix, and what `allocate` added. `is_torn`: the
    tree has all of its load, but from elsewhere, so what ran on the slots of that load is void.
    """

    def __init__(self, state: State, page_size: int, lookup: Lookup) -> None:
        super().__init__(state, page_size, lookup)
        self._torn = False
        self.is_torn = False
        self._pin(lookup.found)

    # What follows is for the cache that made the match.

    @property
    def flushed(self) -> bool:
        """Whether what it runs on was flushed: nobody else finds it, nor what is added to it."""
        return self.root != self.namespace.fingerprint

    def go_on_as(self, root: bytes) -> None:
        """What it runs on was flushed: it goes on under a name that no other has."""
        self.root = root

    def use(self) -> bool:
        """The match is used. True the first time: its hits and its recency count then, and once."""
        if self._used:
            return False
        self._used = True
        self._hits.used(self.tokens, self._found)
        self._state.tree.touch(self._found, self._found.usable_pages, self.wish)
        return True

    def start_load(self, span: Span, load: LoadBack) -> None:
        """Run on pages that are loading, up to the end of `span`."""
        self.loads_begun += 1
        self._short = self._torn = False
        self._load = load
        self._told = frozenset()
        self._span = span
        self._retire_snapshots()
        self._unsettled = len(load.ops)
        self.length_tokens = span.stop * self._page_size
        if not load.ops:
            self._finish_load()

    def load_settled(self, duplicates: Retired, whole: bool) -> None:
        """A load it waits for has settled. Unless all of it came, what was run on it is void.

        Duplicates stay as long as something may run on them: not when it was never told of their slots.
        """
        self._torn = self._torn or not whole
        if self._told.isdisjoint(duplicates.slots):
            self._state.give_back((), [duplicates], None)
        else:
            self._retired.append(duplicates)
        self._one_settled()

    def _one_settled(self) -> None:
        self._unsettled -= 1
        if self._unsettled == 0 and not self._away:
            self._finish()

    def _finish(self) -> None:
        if self._shared is None:
            self._finish_load()
        else:
            self._finish_return(self._shared)

    def abandon_load(self) -> LoadBack | None:
        """Wait no longer: go on with what is on the device. Returns the loads to leave."""
        load = self._load
        if load is not None:
            self._unsettled = 0
            self._finish_load()
        return load

    def lend(self, slots: Mapping[PoolName, Int32Array], pages: int, new_tokens: int) -> Mapping[PoolName, DeviceSlots]:
        """Take what `wanted` asked for. Returns it, but for live slots."""
        self.length_tokens += new_tokens
        left = self._lent.add_live(slots)
        self._lent.add(left, pages, self.length_tokens // self._page_size - 1)
        return {pool: DeviceSlots(run) for pool, run in left.items()}

    def wanted(self, new_tokens: int, checkpoint: bool) -> tuple[int, dict[PoolName, int]]:
        """How many pages `new_tokens` more tokens need, and the slots per pool, those for states included."""
        target = self.length_tokens + new_tokens
        pages = max(0, -(-target // self._page_size) - self.page_count)
        demand = dict.fromkeys(self._lent.token_pools, pages)
        last = target // self._page_size - 1
        for pool in self._lent.state_pools:
            demand[pool] = int(pool not in self._lent.live)
            demand[pool] += int(checkpoint and last >= 0 and not self._has_snapshot(pool, last))
        return pages, {pool: count for pool, count in demand.items() if count}

    def _has_snapshot(self, pool: PoolName, page: int) -> bool:
        if self._lent.has_snapshot(pool, page):
            return True
        if page >= self._span.stop:
            return False
        loading = self._load is not None and self._load.runs[pool][page] != HOLE
        return bool(loading or self._state.tree.slots(self._span, pool, Tier.DEVICE, page, page + 1)[0] != HOLE)

    def drop_snapshots(self, page: int) -> None:
        """Free what was lent for the snapshots that page `page` is."""
        self._state.free_device(self._lent.take_snapshots(page, page + 1))

    def can_offer(self, pages: int, checkpoints: bool) -> bool:
        """Whether it was lent anything of its first `pages` pages that the tree may have."""
        return pages > self._span.stop or (checkpoints and self._lent.has_snapshots(pages))

    def offer(self, pages: int, checkpoints: bool) -> tuple[int, dict[PoolName, Int32Array]]:
        """What it was lent of its pages up to page `pages`: the first page, and runs per pool from there on."""
        return self._lent.offer(self._span.stop, pages, checkpoints)

    def handed_over(
        self, inserted: InsertResult, first: int, pages: int, checkpoints: bool, after: Event | None
    ) -> None:
        """The tree has taken what was offered of pages `first` to `pages`, but for duplicates.

        Pin what is there, in every pool until `after` has passed. Without a token pool the tree knows no page behind
        the last snapshot: the account goes on having those.
        """
        found = inserted.match
        shared = min(pages, found.pages)
        if after is not None and first < shared:
            written = self._state.tree.span(found, first, shared)
            self._state.give_back([self._state.tree.pin_span(written, Pin.HERE)], (), after)
        self._retired.append(Retired(inserted.duplicates))
        if checkpoints:
            self._lent.take_snapshots(stop=pages)
        self._lent.take_pages(shared - self._span.stop)
        self._hold(found, shared, [self._state.tree.pin(found, Pin.HERE, shared)], after)

    def computed(self, tokens: int, after: Event | None) -> None:
        """The request has computed `tokens` tokens in all; what only that reads is free once `after` has passed."""
        self.length_tokens = max(self.length_tokens, tokens)
        if after is not None:
            self._after = after
        retired, self._retired = self._retired, []
        self._state.give_back((), retired, after)

    def end(self, after: Event | None) -> LoadBack | None:
        """Give everything back once `after`, or what `insert` was told last, has passed. Returns the loads to leave."""
        self.require_open()
        self._open = False
        self._retired.append(Retired(self.lent))
        self._lent = Lent({})
        receipts, self._receipts = self._receipts, []
        retired, self._retired = self._retired, []
        self._state.give_back(receipts, retired, after if after is not None else self._after)
        load, self._load = self._load, None
        self._unsettled = self.length_tokens = 0
        return load

    # Retraction

    def leave(self, parcel: Parcel, shared: Shared, after: Event | None) -> None:
        """Its own slots are the parcel's now. What it stood on is pinned by the parcel, as `shared` says."""
        self._parcel, self._shared, self._away = parcel, shared, True
        receipts, self._receipts = self._receipts, []
        retired, self._retired = self._retired, []
        self._state.give_back(receipts, retired, after)

    def leave_for_storage(self, parcel: Parcel, shared: Shared, account: Lent, after: Event | None) -> None:
        """As `leave`; the parcel has the old pins, and pages that it shared are its own (part of `account`) instead."""
        self._receipts = []
        self._lent = account
        self._span = shared.span
        self.leave(parcel, shared, after)

    def parcel_expected(self, loads: LoadBack) -> None:
        """The parcel is on its way back, and so are shared pages."""
        self._load = loads
        self._unsettled = len(loads.ops) + 1

    def parcel_arrived(self, *, good: bool) -> None:
        """Its own slots are lent to it again; without `good` they don't hold what they should."""
        self._parcel = None
        self._short = self._short or not good
        if self._shared is not None:
            self._one_settled()

    def come_back(self, back: Return) -> None:
        """Go on in other slots, before all of them hold what they should."""
        self._lent.move(back.slots)
        self._receipts = [back.receipt]
        self._away = False
        if self._unsettled == 0:
            self._finish()

    def abandon_return(self) -> LoadBack | None:
        """Wait no longer: what it ran on is void. Returns the loads to leave."""
        load, self._load = self._load, None
        self._unsettled = 0
        self._short = True
        self._shared = None
        self._state.counters.retraction_lost += 1
        return load

    def _finish_return(self, shared: Shared) -> None:
        self._short = self._short or not shared.on_device(self._state)
        self._load = self._shared = None
        if self._short:
            self._state.counters.retraction_lost += 1
        else:
            self._state.counters.retraction_restores += 1

    def resume(self, pages: int) -> Span:
        """Match again, up to `pages` pages, to load: the longest prefix to resume at.

        What the loads find on the device, or bring, stays there: the request runs on it before all has come.
        """
        found = self._state.tree.match(self.root, self.tokens, pages)
        stays = self._state.tree.pin(found, Pin.HERE, found.usable_pages)
        usable = self._pin(found)
        self._receipts.append(stays)
        return usable

    def _pin(self, found: TreeMatch) -> Span:
        tree = self._state.tree
        receipts = [tree.pin(found, Pin.HERE, found.device_pages)]
        if found.usable_pages > found.device_pages:
            receipts.append(tree.pin(found, Pin.SOMEWHERE, found.usable_pages))
        usable = tree.span(found, 0, found.usable_pages)
        self._hold(found, found.device_pages, receipts)
        self.length_tokens = found.device_pages * self._page_size
        if not self._used:
            self._found = found
        return usable

    def _hold(self, found: TreeMatch, pages: int, receipts: list[Receipt], after: Event | None = None) -> None:
        """Stand on `pages` pages of the tree with new pins. What only the old ones kept may go, once `after` passed."""
        self._span = self._state.tree.span(found, 0, pages)
        old, self._receipts = self._receipts, receipts
        self._state.give_back(old, (), after)

    def shortness_known(self) -> None:
        """The engine has been told how its load ended."""
        self._short = False

    def _finish_load(self) -> None:
        """Keep what has arrived, pin it, count it. What was lent beyond a short load is used for the pages it lacks."""
        state, planned = self._state, self._span.stop
        found = state.tree.match(self.root, self.tokens, planned)
        good = found.device_pages
        self._hold(found, good, [state.tree.pin(found, Pin.HERE, good)])
        self._load = None
        self._hits.loaded(self._found.device_pages, good)
        self.is_torn = self._torn and good == planned
        if good < planned or self.is_torn:
            self._short = True
            self.length_tokens = good * self._page_size
            self._retire_snapshots()

    def _retire_snapshots(self) -> None:
        """The request starts again at the end of its span: snapshots are lent anew."""
        self._retired.append(Retired(self._lent.take_snapshots()))
