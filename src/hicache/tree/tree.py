"""The tree says what is where and decides what goes: no I/O, no locks, no tensors; others act."""

from collections.abc import Mapping, Sequence

import numpy as np

from hicache.errors import InvariantError
from hicache.keys import page_keys
from hicache.tree import evict as eviction
from hicache.tree import fill, forget, marks, pins, reading, runs, use
from hicache.tree.check import check
from hicache.tree.core import Core
from hicache.tree.digest import digest
from hicache.tree.freed import Freed
from hicache.tree.node import Node
from hicache.tree.owned import Owned, place_of
from hicache.tree.policy import NO_WISH, EvictionPolicy, Lru, Wish
from hicache.tree.reach import any_prefix, device_prefix, known_path, resumable
from hicache.tree.shape import KEY_BYTES, drop, trim
from hicache.tree.values import Eviction, InsertResult, Pin, Receipt, Span, TreeMatch, TreePool
from hicache.tree.view import View
from hicache.tree.walk import blocks_of, walk
from hicache.units import HOLE, BoolArray, Int32Array, PoolName, Tier


class RadixTree(Owned):
    """A radix tree over the pages of prompts, with residency per pool and tier.

    `pools`: those with slots of their own, the anchor first. `lookahead_tokens`: how many tokens after a page are part
    of its identity (draft models that look ahead). `host_duplicates_first`: host copies of device pages are evicted
    before last copies (write-back), else after them (write-through).

    Rules of residency: pools of full coverage are at a page of a tier together or not at all; another pool's page is
    there only where one of full coverage is, in any tier. Slots that would break them are given back.
    """

    def __init__(
        self,
        page_size: int,
        pools: Sequence[TreePool],
        *,
        policy: EvictionPolicy | None = None,
        lookahead_tokens: int = 0,
        host_duplicates_first: bool = False,
    ) -> None:
        policy = Lru() if policy is None else policy
        super().__init__(Core(page_size, lookahead_tokens, pools, policy, host_duplicates_first))
        if self._core.stateful is not None:
            self._core.stateful.begin(View(self._core))

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._core.page_size

    @property
    def pools(self) -> tuple[TreePool, ...]:
        """The pools, the anchor first."""
        return self._core.pools

    @property
    def lookahead_tokens(self) -> int:
        """How many tokens after a page are part of its identity."""
        return self._core.lookahead_tokens

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self._core.nodes

    # Reading

    def match(self, namespace: bytes, tokens: bytes, limit_pages: int | None = None) -> TreeMatch:
        """The longest known prefix of `tokens` (little-endian uint32), at most `limit_pages`. Changes nothing."""
        core = self._core
        root = core.roots.get(namespace)
        if root is None:
            return TreeMatch(namespace, (), 0, 0, 0)
        blocks = blocks_of(core, tokens) if core.lookahead_tokens else tokens
        block = core.block_bytes
        limit = len(blocks) // block
        if limit_pages is not None and limit_pages < limit:
            limit = limit_pages
        path, offset = walk(core, root, [], blocks, limit * block, False)
        return self._match_of(namespace, path, offset // block)

    def _match_of(self, namespace: bytes, path: Sequence[Node], pages: int) -> TreeMatch:
        if not path:
            return TreeMatch(namespace, (), 0, 0, 0)
        core = self._core
        on_device = device_prefix(core, path, pages)
        anywhere = any_prefix(core, path, pages)
        if core.loose:
            on_device = resumable(core, path[-1], on_device, False)
            if on_device < anywhere:
                anywhere = resumable(core, path[-1], anywhere, True)
        return TreeMatch(namespace, path, pages, on_device, anywhere)

    def span(self, match: TreeMatch, start: int, stop: int) -> Span:
        """Pages `start` to `stop` of a match, for transfers."""
        if not 0 <= start <= stop <= match.pages:
            raise InvariantError(f"pages {start} to {stop} are not within the {match.pages} pages matched")
        if start == stop:
            return Span(self._root(match.namespace), start, stop)
        node = match.path[-1]
        while node.start >= stop and node.parent is not None:
            node = node.parent
        return Span(node, start, stop)

    def holds(self, span: Span) -> bool:
        """Whether all pages of a span are still in the tree."""
        return span.node.parent is not None and span.stop <= self._core.stop(span.node)

    def narrow(self, span: Span) -> Span:
        """The same pages, named by a node that ends with them: so pinning them keeps the span good.

        Splits the node where the span ends, as a pin does. What lies behind may leave the tree and take the node that
        holds it along.
        """
        if span.start == span.stop:
            return span
        return Span(pins.node_ending_at(self._core, span.node, span.stop), span.start, span.stop)

    def _root(self, namespace: bytes) -> Node:
        core = self._core
        root = core.roots.get(namespace)
        if root is None:
            root = Node(b"", None, 0, 0, core.nothing, core.nothing, core.accounts.of(namespace))
            root.keys = namespace
        return root

    def slots(self, where: TreeMatch | Span, pool: PoolName, tier: Tier, start: int, stop: int) -> Int32Array:
        """The slots of pages `start` to `stop`, HOLE where nothing is resident; int32 [stop - start], read-only."""
        core = self._core
        number = core.pool(pool)
        place = place_of(tier)
        if isinstance(where, TreeMatch):
            if not where.path or start >= stop:
                return np.full(max(0, stop - start), HOLE, np.int32)
            if start == 0:
                quick = reading.joined_slots(where.path, number, place, stop)
                if quick is not None:
                    return quick
            node = where.path[-1]
        else:
            node = where.node
        return reading.slots_up(core, node, number, place, start, stop)

    def namespace(self, span: Span) -> bytes:
        """The fingerprint of the namespace that a span lies in, 32 bytes."""
        node = span.node
        while node.parent is not None:
            node = node.parent
        return marks.ensure_keys(self._core, node)

    def page_keys(self, span: Span) -> bytes:
        """The keys of a span's pages, 32 bytes each; computed when first asked for."""
        core = self._core
        joined = []
        for node, low, high in marks.pieces(core, span.node, span.start, span.stop):
            keys = marks.ensure_keys(core, node)
            joined.append(keys[(low - node.start) * KEY_BYTES : (high - node.start) * KEY_BYTES])
        return b"".join(joined)

    def keys_beyond(self, match: TreeMatch, tokens: bytes, limit_pages: int | None = None) -> bytes:
        """The keys (32 bytes each) of the full pages of `tokens` after those matched, up to page `limit_pages`."""
        core = self._core
        parent = match.namespace
        if match.pages:
            parent = self.page_keys(self.span(match, match.pages - 1, match.pages))
        blocks = blocks_of(core, tokens)
        block = core.block_bytes
        stop = len(blocks) // block if limit_pages is None else min(limit_pages, len(blocks) // block)
        rest = memoryview(blocks)[match.pages * block : stop * block]
        return page_keys(parent, rest, core.page_size + core.lookahead_tokens)

    def tokens(self, span: Span) -> bytes:
        """The tokens of a span, little-endian uint32."""
        core = self._core
        found = marks.pieces(core, span.node, span.start, span.stop)
        return b"".join([marks.tokens_of(core, node, low, high) for node, low, high in found])

    # Using

    def touch(self, match: TreeMatch, pages: int, wish: Wish = NO_WISH) -> None:
        """Counts one use of the first `pages` pages of a match: a hit, recency, and what the request asks for them."""
        if pages > 0 and match.path:
            use.touch(self._core, match.path[-1], pages, wish)

    def advance(self, now_s: float) -> None:
        """The time is `now_s` from now on, in seconds; all ranks say the same. It never goes back."""
        use.advance(self._core, now_s)

    def often_used(self, span: Span, hits: int) -> int:
        """How many pages of the prefix that ends with `span` at least `hits` requests have used."""
        return use.often_used(self._core, span.node, span.stop, hits)

    def pin(self, match: TreeMatch, pin: Pin, pages: int, start: int = 0) -> Receipt:
        """Pins what every pool needs, from page `start` on, to resume after `pages` pages of a match."""
        if not 0 <= pages <= match.pages:
            raise InvariantError(f"can't pin {pages} pages of a match of {match.pages}")
        node = match.path[-1] if match.path else self._root(match.namespace)
        return pins.pin_resumption(self._core, node, pin, pages, start)

    def pin_span(self, span: Span, pin: Pin, pools: Sequence[PoolName] | None = None) -> Receipt:
        """Pins every page of a span in some pools (all by default), for a transfer."""
        names = [pool.name for pool in self._core.pools] if pools is None else pools
        return self.pin_from(span, pin, dict.fromkeys(names, span.start))

    def pin_from(self, span: Span, pin: Pin, starts: Mapping[PoolName, int]) -> Receipt:
        """Pins the pages of a span in some pools, in each from its own absolute page on, for a transfer."""
        core = self._core
        numbers = {core.pool(name): start for name, start in starts.items()}
        return pins.pin_pages(core, span.node, pin, numbers, span.stop)

    def unpin(self, receipt: Receipt) -> None:
        """Gives a pin back. Raises InvariantError if it was given back before."""
        pins.unpin(self._core, receipt)
        self._tidy(receipt)

    def _tidy(self, receipt: Receipt) -> None:
        """Cuts off an empty end that only a pin kept."""
        core = self._core
        if core.lead is None or core.holey:
            end = receipt.spine or receipt.guard or (receipt.parts[0].node if receipt.parts else None)
            if end is not None:
                trim(core, end, Freed(core))

    def unpin_before(self, receipt: Receipt, pool: PoolName, page: int) -> Receipt:
        """Gives back a windowed pool's pins of nodes wholly before `page`. Returns the receipt for the rest."""
        left = pins.unpin_before(self._core, receipt, self._core.pool(pool), page)
        self._tidy(receipt)
        return left

    def pins_total(self) -> int:
        """How many pins were not given back yet."""
        return len(self._core.receipts)

    # Changing

    def insert(
        self,
        namespace: bytes,
        tokens: bytes,
        first_page: int,
        runs_by_pool: Mapping[PoolName, Int32Array],
        tier: Tier = Tier.DEVICE,
        *,
        known: TreeMatch | None = None,
        wish: Wish = NO_WISH,
    ) -> InsertResult:
        """Gives the tree slots for pages `first_page` on of a prefix: one per page and pool, HOLE where there is none.

        Pages without a copy in that tier take theirs; the rest comes back as duplicates, and stays the caller's.
        `known`: a match of a prefix of the same tokens, which spares finding it again. `wish`: what the request asks
        for its pages. Raises InvariantError if the runs differ in length or `tokens` are too few.
        """
        core = self._core
        given, length = fill.given_runs(core, runs_by_pool)
        blocks = blocks_of(core, tokens) if core.lookahead_tokens else tokens
        pages = first_page + length
        if pages * core.block_bytes > len(blocks):
            raise InvariantError(f"{pages} pages were inserted with the tokens of {len(blocks) // core.block_bytes}")
        root = core.roots.get(namespace)
        if root is None:
            root = self._root(namespace)
            core.roots[namespace] = root
        taken = fill.Taken(core)
        met = [] if known is None else known_path(core, known.path, min(known.pages, pages))
        path = fill.insert(core, root, met, blocks, first_page, given, length, place_of(tier), taken)
        if core.stateful is not None:
            use.fill(core, core.stateful, path, first_page, wish)
        if not root.children:
            core.roots.pop(namespace, None)
        added = {pool.name: count for pool, count in zip(core.pools, taken.added, strict=True)}
        pages = min(pages, core.stop(path[-1])) if path else 0
        return InsertResult(self._match_of(namespace, path, pages), taken.duplicates(core), added)

    def attach(
        self, span: Span, tier: Tier, runs_by_pool: Mapping[PoolName, Int32Array]
    ) -> Mapping[PoolName, Int32Array]:
        """Settles a backup or load: gives a span's pages slots in a tier. Returns those not taken, per pool."""
        core = self._core
        given, length = fill.given_runs(core, runs_by_pool)
        if length != len(span):
            raise InvariantError(f"{length} slots per pool were given for a span of {len(span)} pages")
        taken = fill.Taken(core)
        fill.attach(core, span.node, span.start, span.stop, place_of(tier), given, taken)
        return taken.duplicates(core)

    def detach(self, span: Span, tier: Tier, pools: Sequence[PoolName]) -> Eviction:
        """Takes bad data away, pinned or not; what is of no use without it goes along unless pinned."""
        core = self._core
        freed = Freed(core)
        place = place_of(tier)
        classes = sorted({core.classes[core.pool(name)] for name in pools})
        for node, low, high in marks.pieces(core, span.node, span.start, span.stop):
            for pool in classes:
                if node.parent is None:
                    break
                pages = np.arange(node.start, core.stop(node))
                drop(core, node, pool, place, (pages >= low) & (pages < high), freed)
        return freed.eviction(core)

    def evict(
        self, pool: PoolName, tier: Tier, count: int, *, drop_dirty: bool, keep_duplicates: bool = False
    ) -> Eviction:
        """Frees at least `count` slots of a pool in a tier, or as many as may go.

        Without `drop_dirty`, device pages go only if they have a host copy or are of no use to anyone. With
        `keep_duplicates`, host copies of device pages stay.
        """
        core = self._core
        freed = Freed(core)
        eviction.evict(core, core.pool(pool), place_of(tier), count, drop_dirty, freed, keep_duplicates)
        return freed.eviction(core)

    def dirty_count(self, pool: PoolName) -> int:
        """How many device pages of a pool lack a host copy, pinned or not."""
        core = self._core
        return core.dirty[core.classes[core.pool(pool)]]

    def dirty(self, pool: PoolName, count: int) -> tuple[Span, ...]:
        """The next device pages to be evicted that lack a host copy, about `count`, in order: to be written back."""
        core = self._core
        found = eviction.dirty_pages(core, core.pool(pool), count)
        return tuple(Span(node, start, stop) for node, start, stop in found)

    def namespaces(self) -> tuple[bytes, ...]:
        """The fingerprints of the namespaces that have pages."""
        return tuple(self._core.roots)

    def held(self, namespace: bytes) -> Mapping[Tier, Mapping[PoolName, int]]:
        """How many slots a namespace has, per tier and pool."""
        return forget.held(self._core, namespace)

    def flush(self, namespace: bytes | None = None) -> Eviction:
        """Takes everything out of the tree, or out of one namespace, but what is pinned and what leads to it."""
        freed = Freed(self._core)
        forget.flush(self._core, self.namespaces() if namespace is None else [namespace], freed)
        return freed.eviction(self._core)

    def rename(self, namespace: bytes, other: bytes) -> None:
        """What is left of a namespace is found under `other` from now on, where nothing is, and under no other name.

        Pins and spans stay good. A page key that is asked for later may be of either name.
        """
        forget.rename(self._core, namespace, other)

    def mark_stored(self, span: Span, pool: PoolName, epoch: int, pages: BoolArray | None = None) -> None:
        """Remembers that pages of a span (all, or where `pages` says so) are in the storage of attachment `epoch`."""
        self._set_stored(span, pool, epoch, pages, 1)

    def unmark_stored(self, span: Span, pool: PoolName, epoch: int, pages: BoolArray | None = None) -> None:
        """Forgets that pages are stored: they were found missing or damaged."""
        self._set_stored(span, pool, epoch, pages, 0)

    def _set_stored(self, span: Span, pool: PoolName, epoch: int, pages: BoolArray | None, value: int) -> None:
        core = self._core
        number = core.pool(pool)
        for node, low, high, part in marks.masked_pieces(core, span.node, span.start, span.stop, pages):
            marks.set_stored(core, node, low, high, number, epoch, part, value)

    def unstored(self, span: Span, pool: PoolName, epoch: int) -> BoolArray:
        """Which pages of a span are not marked as stored under attachment `epoch`; bool [pages]."""
        core = self._core
        number = core.pool(pool)
        missing = np.ones(len(span), np.bool_)
        for node, low, high in marks.pieces(core, span.node, span.start, span.stop):
            missing[low - span.start : high - span.start] = ~marks.get_stored(node, low, high, number, epoch)
        return missing

    # Auditing

    def digest(self) -> bytes:
        """SHA-256 (32 bytes) of tokens, slots and pins, root by root: equal trees in equal order have equal ones."""
        return digest(self._core)

    def resident(self, pool: PoolName, tier: Tier) -> Int32Array:
        """All slots of a pool in a tier, each as often as the tree has it; int32."""
        core = self._core
        number = core.pool(pool)
        place = place_of(tier)
        held = [(node.device, node.host)[place][number] for node in core.walk()]
        return runs.solid([run for run in held if run is not None])

    def check(self) -> None:
        """Compares everything the tree counts with what it holds. Raises InvariantError on the first difference."""
        check(self._core)
