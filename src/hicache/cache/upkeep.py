"""What is asked of a cache beside requests: how it is, how much room it has, what it should forget or store in."""

from collections.abc import Mapping

from hicache.cache.audit import audit
from hicache.cache.flush import flush
from hicache.cache.match import Match
from hicache.cache.quotas import Quota, promise
from hicache.cache.retraction import Retracted
from hicache.cache.room import device_slots, require_fit, room
from hicache.cache.stats import CacheStats, cache_stats
from hicache.controller import Flush, HybridCacheController
from hicache.coverage import Coverage
from hicache.errors import ClosedError, ConfigError
from hicache.keys import Namespace
from hicache.pools import SlotAllocator
from hicache.storage import PageStore
from hicache.units import Int32Array, PoolName, Tier


class Upkeep:
    """The part of the door that needs no match. It knows all open ones."""

    def __init__(
        self,
        controller: HybridCacheController,
        device_allocators: Mapping[PoolName, SlotAllocator],
        page_size: int,
    ) -> None:
        self._controller = controller
        self._device_allocators = dict(device_allocators)
        self._page_size = page_size
        self._matches: dict[int, Match] = {}
        self._troubles: tuple[str, ...] = ()
        self._closed = False

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def controller(self) -> HybridCacheController:
        """What moves the pages."""
        return self._controller

    @property
    def coverages(self) -> Mapping[PoolName, Coverage]:
        """What each pool with slots of its own must hold of a prefix."""
        return self._controller.state.coverages

    @property
    def in_flight(self) -> int:
        """Transfers that have not settled yet: `poll` has something to wait for."""
        return len(self._controller.state.dispatcher)

    def poll(self) -> None:
        """Settle what workers have finished. Once per scheduler step, unconditionally."""
        self._require_open()
        self._controller.poll()

    def require_fit(self, tokens: int, chunk_tokens: int | None = None, *, tenant: str = "") -> None:
        """Raises CapacityError for a request that can never run here: names need and limit of every pool it misses.

        `tokens`: how many it computes in all, `chunk_tokens` of them (None: all) before it inserts them, which lets
        pages behind a window go. What is promised to other tenants is not for it. Looks at sizes only; any thread may
        ask.
        """
        state, chunk = self._controller.state, tokens if chunk_tokens is None else chunk_tokens
        require_fit(state, self._device_allocators, tokens, chunk, self._page_size, tenant)

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Promise memory to tenants (`Namespace.tenant`), once, before the first request; on all ranks the same.

        Raises ConfigError for more than there is, or when it is too late.
        """
        self._require_open()
        state = self._controller.state
        if self._matches or state.tree.nodes:
            raise ConfigError("quotas are set before the first request; build the cache anew")
        sizes = {
            Tier.DEVICE: {pool: device_slots(self._device_allocators[pool]) for pool in state.pools},
            Tier.HOST: {pool: state.group.get_entry(pool).host_pool.slots for pool in state.pools},
        }
        promise(state, sizes, quotas)

    def room(self, namespace: Namespace | None = None) -> Mapping[PoolName, int]:
        """Per pool with slots of its own, the device slots that are free or may go, maybe after being written back.

        For a request of `namespace`, what is promised to other tenants may not go.
        """
        self._require_open()
        state = self._controller.state
        if namespace is None:
            return room(state)
        with state.tree.asking(namespace.fingerprint):
            return room(state)

    def room_after(self, retracted: Retracted) -> Mapping[PoolName, int]:
        """What `room` would be left if this request came back now; below 0, so many slots are lacking."""
        self._require_open()
        match = retracted.match
        with self._controller.state.tree.asking(match.root):
            return self.room() if match.parcel is None else self._controller.retractions.room_after(match.parcel)

    def evict(self, tier: Tier, pages: int | None = None, pool: PoolName | None = None) -> int:
        """Free up to `pages` pages of the device or host tier (None: all that may go). Returns how many went at once.

        Counted are those of `pool`, by default the anchor; a sidecar with slots of its own goes alone. Without `pages`
        and `pool` every pool is emptied. Device pages without a host copy are written back first: call again after
        `poll`. Raises ConfigError for a pool without slots of its own.
        """
        self._require_open()
        return self._controller.evict(tier, pages, pool)

    def flush(self, namespace: Namespace | None = None, *, force: bool = False, used_only: bool = False) -> Flush:
        """Make all that was computed so far unfindable in every tier: of one namespace, or of all that were used.

        Storage is cleared of these namespaces, and of no other; until it has answered (`done` of what is returned,
        after `poll`), nothing is fetched for them. A namespace that is used for the first time after a flush of all is
        cleared then, since an earlier process may have stored it; not so with `used_only`. The store that is attached
        later is not touched.

        Raises InUseError, with nothing changed, while a match is open in what is to be flushed. With `force` these go
        on with what they have, and what they add is found by nobody either.
        """
        self._require_open()
        scope = None if namespace is None else namespace.fingerprint
        return flush(self._controller, self._matches.values(), scope, force=force, used_only=used_only)

    def attach_storage_backend(self, store: PageStore) -> None:
        """Use a page store from now on; it is closed with the cache. Raises StorageError when one is attached."""
        self._require_open()
        self._controller.attach_storage_backend(store)
        self._troubles = ()

    def detach_storage_backend(self) -> None:
        """Stop using the page store. It is closed once the transfers under way have settled."""
        self._require_open()
        self._controller.detach_storage_backend()

    def run_without_storage(self, reason: str) -> None:
        """Say in `health` why a store that was asked for is not in use."""
        self._troubles = (reason,)

    def health(self) -> tuple[str, ...]:
        """One sentence for each thing that is degraded now; empty when all is well. Serving goes on either way."""
        store = self._controller.storage
        return self._troubles + (store.health() if store is not None else ())

    def stats(self) -> CacheStats:
        """Per pool and tier: slots, bytes; hits in tokens with their denominator; transfers in flight; failures."""
        self._require_open()
        return cache_stats(self._controller, self._device_allocators, self._matches.values())

    def digest(self) -> bytes:
        """SHA-256 of all that the tree holds in memory, the same on ranks that decided alike. Looks at every node."""
        self._require_open()
        return self._controller.state.tree.digest()

    def taken_slots(self, pool: PoolName, tier: Tier) -> Int32Array:
        """Slots of a pool with slots of its own that are not free, on device or host, ascending: whoever has them."""
        self._require_open()
        if tier is Tier.DEVICE:
            return self._device_allocators[pool].taken()
        return self._controller.mem_pool_host.get_pool(pool).taken()

    def audit(self) -> None:
        """Raises InvariantError unless every slot is exactly one of free, cached, lent and in flight."""
        self._require_open()
        audit(self._controller, self._device_allocators, self._matches.values())

    def close(self) -> None:
        """Settle all transfers, destroy every pool once, return the memory. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._controller.close()
        self._matches.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this cache was closed; build a new one")
