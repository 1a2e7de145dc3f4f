"""What the parts of the controller share: one tree, one group, one dispatcher, one set of counters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hicache.controller.counters import Counters
from hicache.controller.dispatch import Deferred, Dispatcher, Retired
from hicache.coverage import Coverage
from hicache.pools import HostPoolGroup, PoolTransfer
from hicache.storage import StorageKey, chain_keys
from hicache.transfer.messages import Event
from hicache.tree import Eviction, RadixTree, Receipt, Span
from hicache.units import HOLE, BoolArray, DeviceSlots, HostSlots, Int32Array, PoolName, Tier


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Slots that transfers up to message `newest_id` may still touch."""

    newest_id: int
    eviction: Eviction


@dataclass(slots=True)
class State:
    """The owner's state. Nothing here is touched by another thread."""

    group: HostPoolGroup
    tree: RadixTree
    dispatcher: Dispatcher
    counters: Counters
    deferred: list[Deferred] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)

    @property
    def pools(self) -> tuple[PoolName, ...]:
        """The pools that have slots of their own, in the order of the group."""
        return tuple(entry.name for entry in self.group.entries if entry.derived_from is None)

    @property
    def coverages(self) -> dict[PoolName, Coverage]:
        """What each of them must hold of a prefix."""
        return {pool: self.group.get_entry(pool).coverage for pool in self.pools}

    def members(self, pool: PoolName) -> tuple[PoolName, ...]:
        """The pool and the pools that are derived from it: they lie at the same slots."""
        return (pool, *(entry.name for entry in self.group.entries if entry.derived_from == pool))

    def transfers(
        self, device: Mapping[PoolName, DeviceSlots], host: Mapping[PoolName, HostSlots]
    ) -> tuple[PoolTransfer, ...]:
        """One transfer per physical pool, derived ones included."""
        return tuple(
            PoolTransfer(member, slots, host[pool]) for pool, slots in device.items() for member in self.members(pool)
        )

    def good(self, pool: PoolName, pages: int, good: Mapping[PoolName, BoolArray]) -> BoolArray:
        """Which pages of a pool arrived in full: its own part and that of every pool derived from it."""
        result = np.ones(pages, dtype=np.bool_)
        for member in self.members(pool):
            result &= good.get(member, np.zeros(pages, dtype=np.bool_))
        return result

    def writes(self, pool: PoolName) -> bool:
        """Whether this rank puts a pool's pages into storage for all that hold the same."""
        return self.dispatcher.place.writes(replicated=self.group.get_entry(pool).replicated)

    def storage_keys(self, namespace: bytes, pool: PoolName, before: bytes | None, keys: bytes) -> list[StorageKey]:
        """What a run of pages is called in storage: `keys` (32 bytes per page), after page `before`, None for the root.

        Ranks that hold other bytes have other keys.
        """
        own = self.dispatcher.place.namespace(namespace, replicated=self.group.get_entry(pool).replicated)
        return chain_keys(own, pool, own if before is None else before, keys)

    def storage_namespaces(self, namespace: bytes) -> tuple[bytes, ...]:
        """What a namespace is called in storage, as far as this rank writes there."""
        place = self.dispatcher.place
        kinds = dict.fromkeys(entry.replicated for entry in self.group.entries if self.writes(entry.name))
        return tuple(dict.fromkeys(place.namespace(namespace, replicated=replicated) for replicated in kinds))

    def size_bytes(self, pages: Mapping[PoolName, int]) -> int:
        """Bytes of so many pages per pool, in host memory and storage, on all ranks together."""
        sizes = {pool.name: pool.slot_bytes for pool in self.tree.pools}
        return sum(count * sizes[pool] for pool, count in pages.items())

    def views(self, pool: PoolName, slots: HostSlots) -> tuple[memoryview, ...]:
        """Views of host pages, as storage reads and writes them."""
        pages = self.group.get_pool(pool).pages
        return tuple(memoryview(pages[slot]) for slot in slots)

    def free_device(self, slots: Mapping[PoolName, Int32Array]) -> None:
        """Give device slots back."""
        for pool, run in slots.items():
            taken = present(run)
            if len(taken):
                self.group.get_entry(pool).side(Tier.DEVICE).free(taken)

    def give_back(self, receipts: Iterable[Receipt], retired: Iterable[Retired], after: Event | None) -> None:
        """Give back pins, and one holder's share of slots, once the computation that needs them has passed `after`."""
        if after is None or (self.dispatcher.alone and after.query()):
            self._give_back(receipts, retired)
        else:
            self.deferred.append(Deferred(self.dispatcher.next_id(), after, tuple(receipts), tuple(retired)))

    def _give_back(self, receipts: Iterable[Receipt], retired: Iterable[Retired]) -> None:
        for receipt in receipts:
            self.tree.unpin(receipt)
        for one in retired:
            one.holders -= 1
            if one.holders == 0:
                self.free_device(one.slots)

    def free_host(self, slots: Mapping[PoolName, Int32Array]) -> None:
        """Give host slots back."""
        for pool, run in slots.items():
            taken = present(run)
            if len(taken):
                self.group.free(HostSlots(taken), pool)

    def available(self, pool: PoolName, tier: Tier) -> int:
        """How many slots of a pool are free now."""
        return self.group.get_entry(pool).side(tier).available()

    def room(self, pool: PoolName, tier: Tier) -> int:
        """How many slots of a pool are free now or could be made so."""
        return self.available(pool, tier) + self.tree.evictable(pool, tier)

    def free_eviction(self, eviction: Eviction) -> None:
        """Give back what the tree has let go."""
        self.free_device(eviction.freed.get(Tier.DEVICE, {}))
        self.free_host(eviction.freed.get(Tier.HOST, {}))

    def quarantine(self, eviction: Eviction) -> None:
        """Keep slots that left the tree with bad data until no transfer that is in flight now can touch them."""
        if any(eviction.freed.values()):
            self.quarantined.append(Quarantined(self.dispatcher.newest_id, eviction))
            self.free_quarantined()

    def free_quarantined(self) -> None:
        """Give back the slots whose transfers have all settled by now."""
        oldest = self.dispatcher.oldest_id
        waiting, self.quarantined = self.quarantined, []
        for one in waiting:
            if one.newest_id < oldest:
                self.free_eviction(one.eviction)
            else:
                self.quarantined.append(one)

    def poll(self, now_s: float) -> None:
        """Settle what workers have finished, and give back what computation needed that has passed, on every rank."""
        passed = self.dispatcher.poll(self.deferred, now_s, self.standing)
        self.deferred = [one for one in self.deferred if one not in passed]
        for one in passed:
            self._give_back(one.receipts, one.retired)

    def wait_deferred(self) -> None:
        """Give back what is deferred, waiting for its computation on this rank."""
        waiting, self.deferred = self.deferred, []
        for one in waiting:
            one.after.wait()
            self._give_back(one.receipts, one.retired)

    def standing(self) -> bytes:
        """Numbers that ranks which have decided alike have in common."""
        free = [self.available(pool, tier) for pool in self.pools for tier in (Tier.DEVICE, Tier.HOST)]
        held = [self.tree.nodes, self.tree.pins_total(), len(self.deferred), self.dispatcher.newest_id]
        counts = [self.counters.lookups, self.counters.lookup_tokens, *self.counters.hit_tokens.values()]
        return np.array([*free, *held, *counts], dtype="<i8").tobytes()

    def starts(self, span: Span, pages: Mapping[PoolName, BoolArray]) -> dict[PoolName, int]:
        """Per pool, the first page of a span that is set, counted from the root: pins need to go back no further."""
        return {pool: span.start + int(wanted.argmax()) for pool, wanted in pages.items()}

    def slots(self, span: Span, pool: PoolName, tier: Tier) -> Int32Array:
        """The slots of a span in one pool and tier, HOLE where nothing is resident."""
        return self.tree.slots(span, pool, tier, span.start, span.stop)


def present(run: Int32Array) -> Int32Array:
    """A run of slots without its holes."""
    taken: Int32Array = run[run != HOLE]
    return taken


def spread(pages: BoolArray, slots: Int32Array) -> Int32Array:
    """A run with `slots` at the pages that are set, in order, and HOLE elsewhere."""
    run = np.full(len(pages), HOLE, dtype=np.int32)
    run[pages] = slots
    return run
