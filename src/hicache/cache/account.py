"""A request's account as it is: what it pins, waits for and was lent. Reading it changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hicache.cache.hits import Hits
from hicache.cache.lent import Lent
from hicache.controller import LoadBack, Prefetch
from hicache.controller.dispatch import Retired
from hicache.controller.parcels import Parcel, Shared, Stage
from hicache.controller.state import State, present
from hicache.errors import InvariantError
from hicache.keys import Namespace
from hicache.transfer import Event
from hicache.tree import Receipt, Span, TreeMatch, Wish
from hicache.units import HOLE, DeviceSlots, Int32Array, PoolName, Tier


@dataclass(frozen=True, slots=True)
class Lookup:
    """A prompt (little-endian uint32), what the tree had of it, its ticket if storage was asked, and what it wishes.

    Without `read` nothing is to be used, without `write` nothing is to be shared.
    """

    namespace: Namespace
    tokens: bytes
    found: TreeMatch
    prefetch: Prefetch | None
    wish: Wish
    read: bool = True
    write: bool = True


class Account:
    """What a request has and waits for. Slots are given by page, per pool."""

    def __init__(self, state: State, page_size: int, lookup: Lookup) -> None:
        self._state = state
        self._page_size = page_size
        self._found = lookup.found
        self._receipts: list[Receipt] = []
        self._load: LoadBack | None = None
        self._unsettled = 0
        self._lent = Lent({pool: state.group.get_entry(pool).coverage for pool in state.pools})
        self._retired: list[Retired] = []
        self._after: Event | None = None
        self._used = False
        self._short = False
        self._open = True
        self._parcel: Parcel | None = None
        self._shared: Shared | None = None
        self._away = False
        self._hits = Hits(state, page_size, lookup.prefetch)
        self._told: frozenset[PoolName] = frozenset()
        self.loads_begun = 0
        self.namespace = lookup.namespace
        self.root = lookup.namespace.fingerprint
        self.wish = lookup.wish
        self.reads = lookup.read
        self.writes = lookup.write
        self.tokens = lookup.tokens
        self.length_tokens = 0
        self._span = state.tree.span(lookup.found, 0, 0)

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
        return {tier.value: tokens for tier, tokens in self._hits.tokens.items()}

    @property
    def shared_tokens(self) -> int:
        """Tokens whose pages it has from the tree, or will have once its load has settled. 0 once it was released."""
        return self._span.stop * self._page_size if self._open else 0

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt in full pages that the tree knew when they were matched, usable or not.

        The prompt is there what another was: a snapshot at the end of it is likely to be of use again.
        """
        return self._found.pages * self._page_size

    @property
    def live_slots(self) -> Mapping[PoolName, int]:
        """Per Checkpoint pool, the device slot of the request's own running state; none before it was lent any."""
        return dict(self._lent.live)

    @property
    def page_count(self) -> int:
        """How many pages the account has slots for."""
        return self._span.stop + self._lent.pages

    @property
    def loading(self) -> bool:
        """Whether a load that it waits for has not settled yet."""
        return self._unsettled > 0

    def slots(self, pool: PoolName | None = None) -> DeviceSlots:
        """Device slots of a pool (by default the anchor) by page, int32 [page_count]; HOLE where it needs none.

        Of a Checkpoint pool: page p - 1 has the snapshot at boundary p, where there is one. A slot that the request
        was lent for it goes before the one in the tree.
        """
        self.require_here()
        name = pool if pool is not None else self._state.group.anchor_entry.name
        self._told |= {name}
        run = self._state.slots(self._span, name, Tier.DEVICE)
        if self._load is not None:
            run = np.where(run == HOLE, self._load.runs[name], run)
        return DeviceSlots(self._lent.extend(run, name).astype(np.int32, copy=False))

    # What follows is for the cache that made the match.

    @property
    def lent(self) -> Mapping[PoolName, Int32Array]:
        """Slots that belong to the request alone: new pages in order, or snapshots and the live state.

        Those that its retraction still has are not among them.
        """
        if self._away:
            return {}
        slots = self._lent.all()
        if self._parcel is None:
            return slots
        coming = self._parcel.device
        return {pool: run[~np.isin(run, coming[pool])] if pool in coming else run for pool, run in slots.items()}

    @property
    def retired(self) -> tuple[Retired, ...]:
        """Slots that go back once its computation no longer needs them."""
        return tuple(self._retired)

    @property
    def away(self) -> bool:
        """Whether it was taken off the device and is not back yet."""
        return self._away

    @property
    def returning(self) -> bool:
        """Whether it is coming back: its slots are known, and not all of them hold what they should."""
        return self._shared is not None and not self._away

    @property
    def good_tokens(self) -> int:
        """How far it can go on from: all of its length, or nothing once something of it was lost."""
        return 0 if self._short or self._away or not self._open else self.length_tokens

    @property
    def receipts(self) -> list[Receipt]:
        """Its pins."""
        return list(self._receipts)

    @property
    def is_lost(self) -> bool:
        """Whether it is away and can't come back."""
        return self._parcel is not None and self._parcel.stage is Stage.LOST

    @property
    def parcel(self) -> Parcel | None:
        """Its own state while it is away, until its slots are its own again."""
        return self._parcel

    @property
    def span(self) -> Span:
        """The account's pages in the tree (or loading into it), from page 0."""
        return self._span

    def shared_starts(self) -> dict[PoolName, int]:
        """Per pool, the first page of its span that it needs."""
        group, stop = self._state.group, self._span.stop
        return {
            pool: group.get_entry(pool).coverage.required(stop, self._page_size).start for pool in self._state.pools
        }

    def last_event(self, after: Event | None) -> Event | None:
        """The computation that its pages may still be part of: `after`, or what `insert` was told last."""
        return after if after is not None else self._after

    def owned(self) -> dict[PoolName, Int32Array]:
        """Its own slots, without holes and without pools that it has none of."""
        return solid(self._lent)

    def widened(self, shared: Shared, page: int) -> Lent:
        """What it would own if the pages it shares from `page` on were its own."""
        runs = {}
        for pool, expected in shared.expected.items():
            run = self._state.slots(shared.span, pool, Tier.DEVICE)
            runs[pool] = np.where(expected, run, HOLE)[page:].astype(np.int32)
        return self._lent.with_shared(page, runs)

    def require_open(self) -> None:
        """Raises InvariantError after the match was released."""
        if not self._open:
            raise InvariantError("this match was released; match the prefix again")

    def require_here(self) -> None:
        """Raises InvariantError after the match was released, or while it is away."""
        self.require_open()
        if self._away:
            raise InvariantError("this match was retracted; call retraction_restore first, or retraction_discard")

    def require_settled(self) -> None:
        """Raises InvariantError while a load is under way, while it is away, or after the match was released."""
        self.require_here()
        if self.loading or self._parcel is not None:
            raise InvariantError("a load of this match has not settled; call load.result() first")

    def require_slots(self, pages: int) -> None:
        """Raises InvariantError unless the account has slots for `pages` pages and knows how its load ended."""
        if self._short:
            raise InvariantError("a load of this match came short, what ran on it is void; see load.result()")
        if pages > self.page_count:
            raise InvariantError(f"{pages} pages of tokens, but the match has slots for {self.page_count}")

    def require_away(self) -> None:
        """Raises InvariantError unless it was retracted and is not back."""
        self.require_open()
        if not self._away:
            raise InvariantError("this match is not retracted, or was restored already")

    def require_arrived(self) -> None:
        """Raises InvariantError unless its own slots hold what they should."""
        self.require_here()
        if self._parcel is not None:
            raise InvariantError("this match is coming back; call load.result() first")


def solid(lent: Lent) -> dict[PoolName, Int32Array]:
    """Slots that were lent, without holes and without pools that have none."""
    slots = {pool: present(run) for pool, run in lent.all().items()}
    return {pool: run for pool, run in slots.items() if len(run)}
