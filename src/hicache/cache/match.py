"""A match is a request's account: what it pins, waits for and was lent. Releasing it gives all of it back."""

from collections.abc import Mapping

import numpy as np

from hicache.controller import LoadBack, Prefetch
from hicache.controller.dispatch import Retired
from hicache.controller.state import State, spread
from hicache.coverage import Checkpoint
from hicache.errors import InvariantError
from hicache.keys import TOKEN_BYTES, Namespace
from hicache.transfer import Event
from hicache.tree import Pin, Receipt, Span, TreeMatch
from hicache.units import HOLE, DeviceSlots, Int32Array, PoolName, Tier


class Match:
    """Made by `match_prefix`, extended by `load_back`, `allocate` and `insert`, ended by `release`.

    `length_tokens` is how far the account's slots reach: the usable prefix, and what `allocate` added.
    """

    def __init__(
        self,
        state: State,
        page_size: int,
        namespace: Namespace,
        tokens: bytes,
        found: TreeMatch,
        prefetch: Prefetch | None,
    ) -> None:
        self._state = state
        self._page_size = page_size
        self._prefetch = prefetch
        self._found = found
        self._receipts: list[Receipt] = []
        self._load: LoadBack | None = None
        self._unsettled = 0
        self._lent: dict[PoolName, Int32Array] = {pool: _empty() for pool in state.pools}
        self._retired: list[Retired] = []
        self._after: Event | None = None
        self._used = False
        self._short = False
        self._open = True
        self._cached = dict.fromkeys(Tier, 0)
        self.loads_begun = 0
        self.namespace = namespace
        self.tokens = tokens
        self.length_tokens = 0
        self._pin(found)

    @property
    def device_tokens(self) -> int:
        """Tokens of the prompt that were usable on the device when they were matched."""
        return self._found.device_pages * self._page_size

    @property
    def host_tokens(self) -> int:
        """Tokens beyond those that a load would add."""
        return max(0, self._found.usable_pages - self._found.device_pages) * self._page_size

    @property
    def cached_tokens(self) -> Mapping[str, int]:
        """Prompt tokens that need no computing, by tier: device, host, storage. Final once a load has settled."""
        return {tier.value: tokens for tier, tokens in self._cached.items()}

    @property
    def shared_tokens(self) -> int:
        """Tokens whose pages it has from the tree, or will have once its load has settled. 0 once it was released."""
        return self._span.stop * self._page_size if self._open else 0

    @property
    def page_count(self) -> int:
        """How many pages the account has slots for."""
        return self._span.stop + self._lent_pages

    @property
    def loading(self) -> bool:
        """Whether a load that it waits for has not settled yet."""
        return self._unsettled > 0

    def slots(self, pool: PoolName | None = None) -> DeviceSlots:
        """Device slots of a pool (by default the anchor) by page, int32 [page_count]; HOLE where it needs none."""
        self.require_open()
        name = pool if pool is not None else self._state.group.anchor_entry.name
        run = self._state.slots(self._span, name, Tier.DEVICE)
        if self._load is not None:
            run = np.where(run == HOLE, self._load.runs[name], run)
        return DeviceSlots(np.concatenate((run, self._lent[name])).astype(np.int32, copy=False))

    # What follows is for the cache that made the match.

    @property
    def lent(self) -> Mapping[PoolName, Int32Array]:
        """Slots that belong to the request alone, in page order."""
        return self._lent

    @property
    def retired(self) -> tuple[Retired, ...]:
        """Slots that go back once its computation no longer needs them."""
        return tuple(self._retired)

    @property
    def _lent_pages(self) -> int:
        return max(len(run) for run in self._lent.values())

    def use(self) -> bool:
        """The match is used. True the first time: its hits and its recency count then, and once."""
        if self._used:
            return False
        self._used = True
        counters = self._state.counters
        counters.lookups += 1
        counters.lookup_tokens += len(self.tokens) // TOKEN_BYTES
        self._cached[Tier.DEVICE] = self.device_tokens
        counters.hit_tokens[Tier.DEVICE] += self.device_tokens
        self._state.tree.touch(self._found, self._found.usable_pages)
        return True

    def start_load(self, span: Span, load: LoadBack) -> None:
        """Run on pages that are loading, up to the end of `span`."""
        self.loads_begun += 1
        self._short = False
        self._load = load
        self._span = span
        self._unsettled = len(load.ops)
        self.length_tokens = span.stop * self._page_size
        if not load.ops:
            self._finish_load()

    def load_settled(self, duplicates: Retired) -> None:
        """A load it waits for has settled."""
        self._retired.append(duplicates)
        self._unsettled -= 1
        if self._unsettled == 0:
            self._finish_load()

    def abandon_load(self) -> LoadBack | None:
        """Wait no longer: go on with what is on the device. Returns the loads to leave."""
        load = self._load
        if load is not None:
            self._unsettled = 0
            self._finish_load()
        return load

    def lend(self, slots: Mapping[PoolName, Int32Array], pages: int, new_tokens: int) -> None:
        """Add `pages` pages of slots. A snapshot slot lies at the last full page."""
        state = self._state
        self.length_tokens += new_tokens
        boundary = self.length_tokens // self._page_size - self._span.stop - self._lent_pages - 1
        for pool, run in self._lent.items():
            taken = slots.get(pool, _empty())
            if isinstance(state.group.get_entry(pool).coverage, Checkpoint):
                at = np.zeros(pages, dtype=np.bool_)
                at[boundary : boundary + len(taken)] = True
                taken = spread(at, taken)
            self._lent[pool] = np.concatenate((run, taken))

    def wanted(self, new_tokens: int) -> tuple[int, dict[PoolName, int]]:
        """How many pages `new_tokens` more tokens need, and the slots per pool."""
        have = self.page_count
        target = self.length_tokens + new_tokens
        pages = max(0, -(-target // self._page_size) - have)
        snapshots = int(pages > 0 and target // self._page_size > have)
        demand = {}
        for pool in self._lent:
            coverage = self._state.group.get_entry(pool).coverage
            count = snapshots if isinstance(coverage, Checkpoint) else pages
            if count:
                demand[pool] = count
        return pages, demand

    def hand_over(self, pages: int) -> dict[PoolName, Int32Array]:
        """The lent slots of the account's pages up to page `pages`: what goes into the tree."""
        count = pages - self._span.stop
        return {pool: run[:count] for pool, run in self._lent.items()}

    def handed_over(
        self, found: TreeMatch, pages: int, duplicates: Mapping[PoolName, Int32Array], after: Event | None
    ) -> None:
        """The tree has taken them, but for `duplicates`. Pin what is there; free what only computation still reads."""
        count = pages - self._span.stop
        if after is not None:
            self._after = after
        self._retired.append(Retired(duplicates))
        self._hold(found, pages, [self._state.tree.pin(found, Pin.HERE, pages)], after)
        self._lent = {pool: run[count:] for pool, run in self._lent.items()}
        self._free_retired(after)

    def computed(self, tokens: int) -> None:
        """The request has computed `tokens` tokens in all."""
        self.length_tokens = max(self.length_tokens, tokens)

    def end(self, after: Event | None) -> LoadBack | None:
        """Give everything back once `after`, or what `insert` was told last, has passed. Returns the loads to leave."""
        self.require_open()
        self._open = False
        self._retired.append(Retired(self._lent))
        self._lent = {pool: _empty() for pool in self._lent}
        receipts, self._receipts = self._receipts, []
        retired, self._retired = self._retired, []
        self._state.give_back(receipts, retired, after if after is not None else self._after)
        load, self._load = self._load, None
        self._unsettled = self.length_tokens = 0
        return load

    @property
    def span(self) -> Span:
        """The account's pages in the tree (or loading into it), from page 0."""
        return self._span

    def resume(self, pages: int) -> Span:
        """Match again, up to `pages` pages, to load: the longest prefix to resume at.

        What the loads find on the device, or bring, stays there: the request runs on it before all has come.
        """
        found = self._state.tree.match(self.namespace.fingerprint, self.tokens, pages)
        usable = self._pin(found)
        self._receipts.append(self._state.tree.pin(found, Pin.HERE, found.usable_pages))
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

    def require_settled(self) -> None:
        """Raises InvariantError while a load is under way, or after the match was released."""
        self.require_open()
        if self.loading:
            raise InvariantError("a load of this match has not settled; call load.result() first")

    def require_slots(self, pages: int) -> None:
        """Raises InvariantError unless the account has slots for `pages` pages and knows how its load ended."""
        if self._short:
            raise InvariantError("a load of this match came short, what ran on it is void; see load.result()")
        if pages > self.page_count:
            raise InvariantError(f"{pages} pages of tokens, but the match has slots for {self.page_count}")

    def shortness_known(self) -> None:
        """The engine has been told how its load ended."""
        self._short = False

    def require_open(self) -> None:
        """Raises InvariantError after the match was released."""
        if not self._open:
            raise InvariantError("this match was released; match the prefix again")

    def _finish_load(self) -> None:
        """Keep what has arrived, pin it, count it. What was lent beyond a short load is used for the pages it lacks."""
        state, planned = self._state, self._span.stop
        found = state.tree.match(self.namespace.fingerprint, self.tokens, planned)
        good = found.device_pages
        self._hold(found, good, [state.tree.pin(found, Pin.HERE, good)])
        self._load = None
        self._count_load(good)
        if good < planned:
            self._short = True
            self.length_tokens = good * self._page_size
            self._retire_snapshots()

    def _count_load(self, good: int) -> None:
        size, counters = self._page_size, self._state.counters
        device = min(self._found.device_pages, good)
        stored = 0
        if self._prefetch is not None:
            stored = int(self._prefetch.fetched(good)[device:].sum())
        before = self._cached
        self._cached = {
            Tier.DEVICE: device * size,
            Tier.HOST: (good - device - stored) * size,
            Tier.STORAGE: stored * size,
        }
        for tier, tokens in self._cached.items():
            counters.hit_tokens[tier] += tokens - before[tier]

    def _retire_snapshots(self) -> None:
        for pool, run in self._lent.items():
            if isinstance(self._state.group.get_entry(pool).coverage, Checkpoint):
                self._retired.append(Retired({pool: run}))
                self._lent[pool] = np.full(len(run), HOLE, dtype=np.int32)

    def _free_retired(self, after: Event | None) -> None:
        retired, self._retired = self._retired, []
        self._state.give_back((), retired, after)


def _empty() -> Int32Array:
    return np.empty(0, dtype=np.int32)
