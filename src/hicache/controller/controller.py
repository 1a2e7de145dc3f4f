"""Reserve, submit, settle: complete or abort, never half. Failures here shrink a hit and are counted."""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from hicache.controller.agree import Agree, Subject
from hicache.controller.background import Background
from hicache.controller.backup import Backups
from hicache.controller.computing import AllOf, Computing
from hicache.controller.counters import Counters
from hicache.controller.dispatch import Dispatcher
from hicache.controller.fetches import Fetches
from hicache.controller.flushes import Flush, Flushes
from hicache.controller.labels import Labels
from hicache.controller.lifts import Lifts
from hicache.controller.loads import LoadBack, Loads, Waiter
from hicache.controller.patience import Patience
from hicache.controller.prefetch import Prefetch, Prefetches
from hicache.controller.reclaim import Reclaimer
from hicache.controller.retractions import Retractions
from hicache.controller.state import State
from hicache.controller.stores import Attachment, Stores
from hicache.controller.streams import Streams
from hicache.coverage import Coverage
from hicache.errors import ConfigError, StorageError
from hicache.keys import Namespace
from hicache.pools import HostPool, HostPoolGroup, PoolEntry
from hicache.storage import PageStore
from hicache.transfer.executor import Executor
from hicache.transfer.messages import Event
from hicache.tree import EvictionPolicy, RadixTree, Span, TreePool
from hicache.units import PoolName, Tier

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """What a controller is told. `page_size` and lookahead in tokens, batches in pages.

    `write_through_hits`: how many requests use a page before it is written through selectively. `write_back_watermark`:
    the share of a device pool that may be without host copies under write-back.
    """

    page_size: int
    write_policy: WritePolicy = "write_through"
    batch_pages: int = 32
    lookahead_tokens: int = 0
    write_through_hits: int = 2
    write_back_watermark: float = 0.7


class HybridCacheController:
    """Moves the pages of a whole group between device, host and storage. Lives on the owner's thread."""

    def __init__(
        self,
        entries: Iterable[PoolEntry],
        layer_count: int,
        config: ControllerConfig,
        executor: Executor,
        *,
        clock: Callable[[], float],
        agree: Agree,
        policy: EvictionPolicy,
        slot_bytes: Mapping[PoolName, int] | None = None,
    ) -> None:
        """`slot_bytes`: what a slot of a pool holds on all ranks together, where that is more than it does here."""
        self.mem_pool_host = HostPoolGroup(layer_count, [self._with_reclaim(entry) for entry in entries])
        self._config = config
        self._policy = policy
        self._slot_bytes = dict(slot_bytes) if slot_bytes is not None else {}
        counters = Counters()
        dispatcher = Dispatcher(executor, agree, counters)
        self._state = State(self.mem_pool_host, self._new_tree(self._own_coverages()), dispatcher, counters)
        self._clock = clock
        self._agree = agree
        self._attachment: Attachment | None = None
        self._detached: list[tuple[int, PageStore]] = []
        self._epochs = 0
        self._flushes = Flushes(self._state, lambda: self._attachment)
        self._labels = Labels(self._state)
        self._make_parts()

    def _own_coverages(self) -> dict[PoolName, Coverage]:
        """Coverages of the pools that have slots of their own."""
        return {entry.name: entry.coverage for entry in self.mem_pool_host.entries if entry.derived_from is None}

    def _new_tree(self, coverages: Mapping[PoolName, Coverage]) -> RadixTree:
        return RadixTree(
            self._config.page_size,
            [self._tree_pool(name, coverage) for name, coverage in coverages.items()],
            policy=self._policy,
            lookahead_tokens=self._config.lookahead_tokens,
            host_duplicates_first=self._config.write_policy == "write_back",
        )

    def _tree_pool(self, name: PoolName, coverage: Coverage) -> TreePool:
        entries = [entry for entry in self.mem_pool_host.entries if name in (entry.name, entry.derived_from)]
        slot_bytes = sum(self._slot_bytes.get(entry.name, entry.host_pool.layout.page_bytes) for entry in entries)
        return TreePool(name, coverage, slot_bytes, self.mem_pool_host.get_entry(name).device_pool.slots)

    def _make_parts(self) -> None:
        """What moves pages, for the pools that there are now."""
        config, coverages = self._config, self._own_coverages()
        self._backups = Backups(self._state, self._store)
        self._loads = Loads(self._state, coverages, config.page_size)
        self._stores = Stores(self._state, config.batch_pages)
        self._streams = Streams(self._state, self._backups, self._store, lambda: self._attachment)
        self._fetches = Fetches(self._state, config.batch_pages, config.page_size, self.now)
        lifts = Lifts(self._state, self._loads, lambda: self.writing_back)
        self._prefetches = Prefetches(self._state, self._fetches, lifts, coverages, config.page_size, self.now)
        selective = config.write_policy == "write_through_selective"
        self._reclaimer = Reclaimer(self._state, self._backups, write_back=not selective)
        self._background = Background(self._state, self._backups, config.write_back_watermark)
        self._computing = Computing()
        self._retractions = Retractions(
            self._state, self._backups, self._loads, lambda: self._attachment, config.batch_pages
        )

    def register_pools(self, entries: Sequence[PoolEntry]) -> None:
        """Add pools, all or none, before anything was cached, handed out or asked for.

        Raises ConfigError that names the pool.
        """
        group = self.mem_pool_host
        if len(self._state.dispatcher) and not group.sealed:
            names = [entry.name for entry in entries]
            raise ConfigError(
                f"pools {names} come too late: a prefetch is under way; register every pool before the first request"
            )
        group.add_entries([self._with_reclaim(entry) for entry in entries])
        if self._attachment is not None:
            self._attachment.store.register(_arenas(entries))
        self._state.tree = self._new_tree(self._own_coverages())
        self._make_parts()

    @property
    def state(self) -> State:
        """Tree, group, what is in flight, counters."""
        return self._state

    @property
    def alone(self) -> bool:
        """Whether there is one rank."""
        return self._agree.ranks == 1

    def note_request(self, namespace: Namespace, tokens: bytes) -> None:
        """A namespace is used, for these tokens (little-endian uint32).

        Every rank is given them in this step; where a rank is not, all will know.
        """
        self._state.tree.own(namespace.fingerprint, namespace.tenant)
        if self._attachment is not None:
            self._labels.tell(namespace, self._attachment.store)
        if not self.alone:
            self._agree.note(Subject.REQUESTS, namespace.tenancy, tokens)

    @property
    def fetches(self) -> Fetches:
        """The fetches under way."""
        return self._fetches

    @property
    def retractions(self) -> Retractions:
        """The requests that were taken off the device."""
        return self._retractions

    @property
    def storage_host_pool(self) -> HostPool:
        """The anchor's physical host pool: never the group, which is `mem_pool_host`."""
        return self.mem_pool_host.storage_host_pool

    @property
    def storage(self) -> PageStore | None:
        """The attached page store."""
        return self._attachment.store if self._attachment is not None else None

    @property
    def writing_back(self) -> bool:
        """Whether a backup is in flight: device pages will be clean, and can go, once it has settled."""
        return self._backups.running > 0

    def write(self, span: Span, after: Event | None = None) -> bool:
        """Back up, once `after` has passed, and store what a span (from page 0) holds.

        False: the host has no room for all of it; what storage takes then goes there in pieces.
        """
        taken = self._backups.start(span, after)
        if not taken:
            self._streams.add(span, after)
        self._store(span)
        return taken

    def computed(self, span: Span, after: Event | None) -> None:
        """New pages are in the tree, at the end of `span` (from page 0): write them through, if that is the policy."""
        self._computing.add(after)
        if self._config.write_policy == "write_through":
            self.write(span, after)

    def used(self, span: Span) -> None:
        """A span (from page 0) is used: write through what was used often enough, if that is the policy.

        What is on the host and the store has not taken so far is offered again.
        """
        if self._config.write_policy == "write_through_selective":
            pages = self._state.tree.often_used(span, self._config.write_through_hits)
            part, after = Span(span.node, 0, pages), self._computing.all()
            if not self._backups.start(part, after):
                self._streams.add(part, after)
        self._store(span)

    def imported(self, span: Span) -> None:
        """Pages of a span (from page 0) came from elsewhere into host memory: storage is offered what it lacks."""
        self._store(span)

    def written(self, after: Event | None) -> Event | None:
        """What a copy of any page waits for, besides `after`; None if nothing."""
        pending = [event for event in (self._computing.all(), after) if event is not None]
        return AllOf(pending) if pending else None

    def load(self, span: Span, waiter: Waiter) -> LoadBack | None:
        """Load what resuming at the end of `span` (from page 0) lacks on the device. None when there is no room."""
        return self._loads.start(span, waiter)

    def leave(self, load: LoadBack, waiter: Waiter) -> None:
        """The waiter has gone; its loads go on."""
        self._loads.leave(load.ops, waiter)

    def give_up(self, load: LoadBack, waiter: Waiter) -> None:
        """The waiter has waited long enough for its loads."""
        self._loads.give_up(load.ops, waiter)

    def prefetch(self, namespace: bytes, tokens: bytes, pages: int, patience: Patience) -> Prefetch:
        """Fetch from storage what the first `pages` pages of `tokens` lack in memory."""
        self._flushes.use(namespace)
        attachment = self._attachment if self._flushes.may_fetch(namespace) else None
        return self._prefetches.start(namespace, tokens, pages, patience, attachment)

    def tell_compute_rate(self, tokens_per_s: float) -> None:
        """What the engine computes; every rank is told the same, or all will know."""
        if not self.alone:
            self._agree.note(Subject.REQUESTS, struct.pack("<d", tokens_per_s))
        self._prefetches.tokens_per_s = tokens_per_s

    def cancel_prefetch(self, prefetch: Prefetch) -> None:
        """Nobody waits for it any more."""
        self._prefetches.cancel(prefetch)

    @property
    def flushes(self) -> Flushes:
        """What was flushed, and what is to be known of it."""
        return self._flushes

    def flush(
        self, namespace: bytes | None, holders: Mapping[bytes, int], *, used_only: bool
    ) -> tuple[Flush, Mapping[bytes, bytes]]:
        """Make everything of a namespace, or of all, unfindable in every tier.

        `holders`: how many requests run on each namespace. They go on under the names that are returned, and each is
        to be told to `flushes.leave` when it ends.
        """
        names = self._flushes.scope(holders) if namespace is None else (namespace,)
        self._prefetches.end_in(frozenset(names))
        self._fetches.drop_in(frozenset(names))
        return self._flushes.start(names, holders, everything=namespace is None and not used_only)

    def evict(self, tier: Tier, pages: int | None, pool: PoolName | None = None) -> int:
        """Free up to `pages` pages of a tier (None: all that can go), counted in `pool`; by default in the anchor.

        Without both, every pool is emptied. Returns how many went at once. Device pages without a host copy are written
        back first, and go at a later call. Raises ConfigError for a pool without slots of its own.
        """
        counted = self.mem_pool_host.anchor_entry.name if pool is None else pool
        before = self._state.available(counted, tier)
        for name in self._state.pools if pool is None and pages is None else (counted,):
            self._evict(name, tier, pages)
        return self._state.available(counted, tier) - before

    def _evict(self, pool: PoolName, tier: Tier, pages: int | None) -> None:
        most = self._state.tree.evictable(pool, tier)
        count = self._state.available(pool, tier) + (most if pages is None else min(pages, most))
        if tier is Tier.DEVICE:
            self._reclaimer.evict_device(pool, count)
        else:
            self._reclaimer.evict_host(pool, count)

    def attach_storage_backend(self, store: PageStore) -> None:
        """Use a page store from now on. Raises StorageError when one is attached already."""
        if self._attachment is not None:
            raise StorageError("a storage backend is attached; detach it first")
        store.register(_arenas(self.mem_pool_host.entries))
        self._epochs += 1
        self._attachment = Attachment(store, self._epochs)
        self._labels.forget()

    def detach_storage_backend(self) -> None:
        """Stop using the page store. It is closed once the transfers under way have settled."""
        if self._attachment is None:
            return
        self._prefetches.end_all()
        self._retractions.leave_store()
        self._detached.append((self._state.dispatcher.newest_id, self._attachment.store))
        self._attachment = None
        self._flushes.leave_store()
        self._close_detached()

    def poll(self) -> None:
        """Settle what the workers have finished. Once per scheduler step, whatever the step does."""
        self._state.poll(self._clock())
        self._state.free_quarantined()
        now_s = self.now()
        self._state.tree.advance(now_s)
        self._prefetches.step(now_s)
        self._flushes.step()
        self._streams.step()
        if self._config.write_policy == "write_back":
            self._background.step()
        self._close_detached()

    def now(self) -> float:
        """The time that all ranks agree on, in seconds; with several of them, that of the last `poll`."""
        return self._agree.now(self._clock())

    def close(self) -> None:
        """Settle all transfers, then give the memory back and close the store."""
        with ExitStack() as memory:
            memory.callback(self.mem_pool_host.close)
            self.detach_storage_backend()
            self._state.dispatcher.close()
            self._state.wait_deferred()
            self._state.free_quarantined()
            self._close_detached()

    def _with_reclaim(self, entry: PoolEntry) -> PoolEntry:
        """The entry with the cache's own way of making room. The functions run only once the controller is built."""
        if entry.derived_from is not None:
            return entry
        name = entry.name
        return replace(
            entry,
            host_evict_fn=lambda count: self._reclaimer.evict_host(name, count),
            host_evictable_fn=lambda: self._state.tree.evictable(name, Tier.HOST),
            device_evict_fn=lambda count: self._reclaimer.evict_device(name, count),
            device_evictable_fn=lambda: self._state.tree.evictable(name, Tier.DEVICE),
        )

    def _store(self, span: Span) -> None:
        if self._attachment is not None and not self._is_flushed(span):
            self._stores.start(span, self._attachment)

    def _is_flushed(self, span: Span) -> bool:
        return self._flushes.any_retired and self._flushes.is_retired(self._state.tree.namespace(span))

    def _close_detached(self) -> None:
        oldest = self._state.dispatcher.oldest_id
        while self._detached and self._detached[0][0] < oldest:
            self._detached.pop(0)[1].close()


def _arenas(entries: Iterable[PoolEntry]) -> list[memoryview]:
    """The host memory of pools; a derived one has memory too, if no slots of its own."""
    return [entry.host_pool.arena.data.data for entry in entries]
