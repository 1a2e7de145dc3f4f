"""The door: everything an engine asks of the cache, on one thread, and nothing that blocks on I/O but `Load.wait`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hicache.cache.account import Lookup
from hicache.cache.load import Load
from hicache.cache.loading import load_of, return_of
from hicache.cache.match import Match
from hicache.cache.namespaces import require_fitting
from hicache.cache.portable import Portable
from hicache.cache.registration import SidecarPoolSpec, prepare, require_no_requests
from hicache.cache.retraction import Retracted, restore, retract
from hicache.cache.tokens import Tokens, token_bytes
from hicache.controller import HybridCacheController, LoadBack, Patience, Prefetch, PrefetchPolicy
from hicache.errors import ConfigError
from hicache.keys import TOKEN_BYTES, Namespace
from hicache.pools import PoolEntry, SlotAllocator
from hicache.transfer import Event
from hicache.tree import Span, Wish
from hicache.units import DeviceSlots, PoolName, Tier

LOAD_ATTEMPTS = 2
"""A load that came short is planned once more for the best remaining length; then the hit is what is on the device."""


class UnifiedRadixCache(Portable):
    """One radix tree and one group of pools on device, host and storage. Built by `build_kv_cache`.

    Every method belongs to one thread, the owner's (the engine's scheduler). Tokens may be little-endian uint32
    bytes or integer arrays. Later use of a closed cache raises ClosedError.
    """

    def __init__(
        self,
        controller: HybridCacheController,
        device_allocators: Mapping[PoolName, SlotAllocator],
        *,
        page_size: int,
        transfer_timeout_s: float,
        patience: Patience,
    ) -> None:
        super().__init__(controller, device_allocators, page_size)
        self._transfer_timeout_s = transfer_timeout_s
        self._patience = patience

    def register_sidecar_pool(self, spec: SidecarPoolSpec, entry: PoolEntry) -> None:
        """Add a pool, derived or with slots of its own, before the first request; the cache closes its host pool.

        It makes no difference whether storage is attached before or after. Raises ConfigError, naming the pool, with
        nothing changed, when it does not fit or comes after a slot was handed out.
        """
        self._register([(spec, entry)])

    def register_hicache_draft_pools(self, pools: Iterable[tuple[SidecarPoolSpec, PoolEntry]]) -> None:
        """Add the pools of a draft model, all or none of them: as `register_sidecar_pool`."""
        self._register(list(pools))

    def _register(self, pools: Sequence[tuple[SidecarPoolSpec, PoolEntry]]) -> None:
        self._require_open()
        sidecars = prepare(self._controller.mem_pool_host, pools)
        require_no_requests(sidecars.entries, len(self._matches))
        self._controller.register_pools(sidecars.entries)
        self._device_allocators |= sidecars.allocators

    def prefetch(
        self,
        tokens: Tokens,
        namespace: Namespace,
        timeout_s: float | None = None,
        *,
        policy: PrefetchPolicy | None = None,
    ) -> Prefetch:
        """Fetch in the background what memory lacks of a prompt and storage has; `done` after `timeout_s` at most.

        How long a request waits is for `policy` to say, else for the settings. Settled by `poll`. Give the ticket to
        `match_prefix`, or to `cancel_prefetch` when the request goes away.
        """
        self._require_open()
        raw = token_bytes(tokens)
        patience = self._patience if policy is None else replace(self._patience, policy=policy)
        if timeout_s is not None:
            patience = replace(patience, timeout_s=timeout_s, page_timeout_s=0.0, most_s=timeout_s)
        require_fitting(namespace, self._lookahead, alone=self._controller.alone)
        self._controller.note_request(namespace, raw)
        return self._controller.prefetch(namespace.fingerprint, raw, self._reusable_pages(raw), patience)

    def tell_compute_rate(self, tokens_per_s: float) -> None:
        """How many prompt tokens the engine computes in a second now: cost-aware prefetches compare storage with it.

        With several ranks each has to be told the same. Raises ConfigError for a rate that is not above 0.
        """
        if not tokens_per_s > 0:
            raise ConfigError(f"the engine's rate is {tokens_per_s}; give tokens per second, above 0")
        self._require_open()
        self._controller.tell_compute_rate(tokens_per_s)

    def cancel_prefetch(self, prefetch: Prefetch) -> None:
        """Nobody waits for it any more. What is under way still lands in the tree."""
        self._require_open()
        self._controller.cancel_prefetch(prefetch)

    def match_prefix(
        self,
        tokens: Tokens,
        namespace: Namespace,
        prefetch: Prefetch | None = None,
        *,
        priority: int = 0,
        ttl_s: float | None = None,
        read: bool = True,
        write: bool = True,
    ) -> Match:
        """What of a prompt is usable, by tier, pinned. At least its last token is left to compute.

        Without `read` nothing is. Without `write`, `insert` shares nothing: all that it computes is its own until
        `release`, also pages that no window sees any more (`require_fit` without a chunk tells what that takes).

        `prefetch` is the prompt's ticket: it tells what came from storage. `priority` and `ttl_s` (seconds, above 0)
        are for all pages that the request uses or inserts; they say how long these stay under the eviction policy
        `priority`, and nothing under others. Raises ConfigError for a `ttl_s` that is not above 0.
        """
        if ttl_s is not None and not ttl_s > 0:
            raise ConfigError(f"ttl_s is {ttl_s}; give seconds, above 0, or None for no end")
        self._require_open()
        require_fitting(namespace, self._lookahead, alone=self._controller.alone)
        raw = token_bytes(tokens)
        self._controller.note_request(namespace, raw)
        state = self._controller.state
        self._controller.flushes.use(namespace.fingerprint)
        found = state.tree.match(namespace.fingerprint, raw, self._reusable_pages(raw) if read else 0)
        lookup = Lookup(namespace, raw, found, prefetch, Wish(priority, ttl_s), read, write)
        match = Match(state, self._page_size, lookup)
        self._matches[id(match)] = match
        return match

    def load_back(self, match: Match) -> Load | None:
        """Begin to load what the match has on the host: its device slots are known at once, its bytes come by layer.

        None: device pages are being written back to make room, ask again after `poll`. Where there is no room to
        be had at all, the load is just what the device holds.
        """
        self._require_open()
        match.require_settled()
        again = match.reads and match.loads_begun < LOAD_ATTEMPTS
        span = match.resume(self._reusable_pages(match.tokens)) if again else match.span
        self._use(match, span)
        with self._controller.state.tree.asking(match.root):
            back = self._controller.load(span, match)
        if back is None and self._controller.writing_back:
            return None
        if back is None:
            self._controller.state.counters.load_refused += 1
            span, back = match.span, LoadBack((), {})
        match.start_load(span, back)
        progress = [op.progress for op in back.ops]
        return load_of(self._controller, match, progress, self._transfer_timeout_s)

    def allocate(
        self, match: Match, new_tokens: int, *, checkpoint: bool = False
    ) -> Mapping[PoolName, DeviceSlots] | None:
        """Lend the match slots for `new_tokens` more tokens: those of new pages per pool, all pools or none.

        Below 0, so many tokens were taken back (a draft that was rejected); pages that were lent for them stay lent.
        With `checkpoint` also a slot in every Checkpoint pool for the snapshot at the last page boundary within the
        account's length, where it has none there: `match.slots` has it. The first call of a match lends it its
        `live_slots` besides, which are not in what it returns.

        None: not enough slots are free now. If device pages are being written back, ask again after `poll`; else
        they are in use by others, or there are not so many at all, as `require_fit` tells beforehand.
        """
        self._require_open()
        match.require_here()
        self._use(match, match.span)
        pages, demand = match.wanted(new_tokens, checkpoint)
        with self._controller.state.tree.asking(match.root):
            reservation = self._controller.mem_pool_host.reserve(demand, Tier.DEVICE)
        if reservation is None:
            return None
        return match.lend(reservation.commit(), pages, new_tokens)

    def drop_checkpoint(self, match: Match, page: int) -> None:
        """Give back what the match was lent for the snapshots at boundary `page` (`page` pages), if it was.

        At once: nobody reads them, and whatever wrote them must have ended.
        """
        self._require_open()
        match.require_arrived()
        match.drop_snapshots(page - 1)

    def insert(self, match: Match, tokens: Tokens, after: Event | None = None, *, checkpoints: bool = True) -> Match:
        """Put the full pages of `tokens` (all that the request has computed) into the tree, to be shared from now on.

        Where a draft looks ahead, a page is full once the tokens after it that it depends on are among them.
        Snapshots up to there go along, also those of pages that went before; without `checkpoints` they stay the
        request's own, for a later call or `drop_checkpoint`.

        Returns the match, whose `slots` may have changed: pages that somebody else had inserted first are used
        instead, and the request's own are freed once `after`, the computation that wrote and reads them, has passed.
        """
        self._require_open()
        match.require_settled()
        raw = token_bytes(tokens)
        pages = max(0, len(raw) // TOKEN_BYTES - self._lookahead) // self._page_size
        match.require_slots(pages)
        if match.writes and match.can_offer(pages, checkpoints):
            self._hand_over(match, raw, pages, after, checkpoints)
        match.computed(len(raw) // TOKEN_BYTES, after)
        return match

    def release(self, match: Match, after: Event | None = None) -> None:
        """End a match at any point: pins, loads and lent slots are given back.

        Pins and slots only once `after` has passed, the computation that still needs them; by default what `insert`
        was told last. Pages that no window sees any more are not pinned: for those, tell `insert`.
        """
        self._require_open()
        parcel, last = match.parcel, match.last_event(after)
        load = match.end(after)
        if load is not None:
            self._controller.leave(load, match)
        if parcel is not None:
            self._controller.retractions.discard(parcel, last)
        self._controller.flushes.leave(match.root)
        del self._matches[id(match)]

    def retraction_backup(self, match: Match, after: Event | None = None) -> Retracted | None:
        """Take a running request off the device, whole: its own slots go to the host in one reservation, all or none.

        Copies begin once `after` has passed, the computation that still writes or reads its pages (by default what
        `insert` was told last); device slots are free once they have settled. What it shares is not copied twice: it
        is pinned on the host instead of the device. Where the host has no room, the request goes on to storage, as an
        object that no other can find. Until `retraction_restore` the match is of no use but to be released.

        None, with nothing taken: neither host nor storage can take it, or its length is 0 and there is nothing to keep.
        Raises InvariantError while a load is under way.
        """
        self._require_open()
        match.require_settled()
        match.require_slots(0)
        if match.length_tokens == 0:
            return None
        self._use(match, match.span)
        with self._controller.state.tree.asking(match.root):
            return retract(self._controller, match, after)

    def retraction_restore(self, retracted: Retracted) -> Load | None:
        """Bring a request back into other device slots, all reserved at once; its match goes on as before.

        Bytes come layer by layer. None: it is still leaving, on its way from storage, or the device has no room; ask
        again after `poll`. When something of it was lost, `result` of the load is 0: release the match and compute the
        request again.
        """
        self._require_open()
        match = retracted.match
        match.require_away()
        with self._controller.state.tree.asking(match.root):
            back = restore(self._controller, match, self._transfer_timeout_s)
        if back is None and not match.is_lost:
            return None
        progress = () if back is None else back.progress
        return return_of(self._controller, match, progress, self._transfer_timeout_s)

    def retraction_discard(self, retracted: Retracted, after: Event | None = None) -> None:
        """End a retracted request at any stage, as `release` of its match does: everything is given back."""
        self.release(retracted.match, after)

    def _hand_over(self, match: Match, raw: bytes, pages: int, after: Event | None, checkpoints: bool) -> None:
        state = self._controller.state
        inserted = raw[: (pages * self._page_size + self._lookahead) * TOKEN_BYTES]
        first, runs = match.offer(pages, checkpoints)
        self._controller.note_request(match.namespace, inserted[first * self._page_size * TOKEN_BYTES :])
        result = state.tree.insert(match.root, inserted, first, runs, wish=match.wish)
        match.handed_over(result, first, pages, checkpoints, after)
        self._controller.computed(match.span, after)

    def _use(self, match: Match, span: Span) -> None:
        if match.use():
            self._controller.used(span)

    def _reusable_pages(self, raw: bytes) -> int:
        """Full pages of a prompt with the tokens they look ahead to; its last token is in none of them."""
        return max(0, len(raw) // TOKEN_BYTES - max(1, self._lookahead)) // self._page_size

    @property
    def _lookahead(self) -> int:
        return self._controller.state.tree.lookahead_tokens
