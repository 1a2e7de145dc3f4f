"""All pools of a model as one: a call takes slots in every pool it names or in none; the first slot seals the group."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from hicache.errors import ClosedError, ConfigError, InvariantError
from hicache.layout import PackedLayout
from hicache.pools.counts import GroupCounts, ReservationCounter
from hicache.pools.entry import PoolEntry, SlotSide
from hicache.pools.host import HostPool
from hicache.pools.registration import GroupCapabilities, check_entry, combined_capabilities
from hicache.pools.reservation import Reservation
from hicache.pools.resolve import plan_resolution
from hicache.pools.transfers import PoolTransfer, without_holes
from hicache.units import DeviceSlots, HostSlots, Int32Array, PoolName, Tier


class HostPoolGroup:
    """The anchor and its sidecars. Owned by the scheduler thread; nothing in it may be called from a worker.

    `layer_count` is the number of the target model's layers. Without a pool name, calls mean the anchor: the entry
    marked `is_primary_index_anchor`, else the first.
    """

    def __init__(self, layer_count: int, entries: Iterable[PoolEntry] = ()) -> None:
        if layer_count < 1:
            raise ConfigError(f"a model has {layer_count} layers; there must be at least 1")
        self._layer_count = layer_count
        self._entries: dict[PoolName, PoolEntry] = {}
        self._ordered: tuple[PoolEntry, ...] = ()
        self._sides: dict[tuple[PoolName, Tier], SlotSide] = {}
        self._capabilities = GroupCapabilities(staged_write_back=False, zero_copy_storage=False)
        self._counter = ReservationCounter()
        self._sealed = False
        self._closed = False
        self.add_entries(entries)

    # Registration

    def add_entry(self, entry: PoolEntry) -> None:
        """Registers a pool. Raises ConfigError, by name, with nothing changed, when it can't be part of this group."""
        self.add_entries([entry])

    def add_entries(self, entries: Iterable[PoolEntry]) -> None:
        """Registers pools, all or none: as `add_entry`. One may be derived from another that comes before it."""
        self._require_open()
        known = dict(self._entries)
        for entry in entries:
            if self._sealed:
                raise ConfigError(
                    f"pool {entry.name!r} comes too late: slots were handed out already;"
                    " register every pool before that"
                )
            check_entry(entry, known, self._layer_count)
            known[entry.name] = entry
        self._entries = known
        self._ordered = _anchor_first(known.values())
        self._capabilities = combined_capabilities(known.values())

    @property
    def sealed(self) -> bool:
        """Whether a slot was ever handed out: from then on no pool can be added."""
        return self._sealed

    @property
    def layer_count(self) -> int:
        """Layers of the target model."""
        return self._layer_count

    @property
    def entries(self) -> tuple[PoolEntry, ...]:
        """Every entry, the anchor first, then in the order of registration."""
        return self._ordered

    @property
    def anchor_entry(self) -> PoolEntry:
        """The entry marked as anchor, else the first. Raises ConfigError when there is none at all."""
        if not self._ordered:
            raise ConfigError("the group has no pools; add an entry first")
        return self._ordered[0]

    @property
    def capabilities(self) -> GroupCapabilities:
        """What every entry supports: counted again whenever one is added."""
        return self._capabilities

    def get_entry(self, name: PoolName) -> PoolEntry:
        """The entry of a pool. Raises ConfigError when it is not registered."""
        if name not in self._entries:
            raise ConfigError(f"pool {name!r} is not registered; there are {list(self._entries)}")
        return self._entries[name]

    def get_pool(self, name: PoolName | None = None) -> HostPool:
        """The physical host pool of an entry, by default the anchor's."""
        return self._entry_or_anchor(name).host_pool

    @property
    def storage_host_pool(self) -> HostPool:
        """The anchor's physical pool: what storage is attached to first."""
        return self.anchor_entry.host_pool

    @property
    def slots(self) -> int:
        """Host slots of the anchor."""
        return self.anchor_entry.host_pool.slots

    @property
    def available(self) -> int:
        """Free host slots of the anchor."""
        return self.anchor_entry.host_pool.available

    @property
    def layout(self) -> PackedLayout:
        """Layout of the anchor's host page."""
        return self.anchor_entry.host_pool.layout

    def derived_transfers(self, sources: Iterable[PoolName]) -> tuple[PoolTransfer, ...]:
        """An unresolved transfer for every pool that lives at the slots of one of `sources`, to go along with them."""
        wanted = tuple(sources)
        return tuple(PoolTransfer(entry.name) for entry in self.entries if entry.derived_from in wanted)

    # Slots

    def alloc(self, count: int, pool: PoolName | None = None) -> HostSlots | None:
        """`count` free host slots of a pool (by default the anchor), or None; evicts nothing."""
        self._require_open()
        slots = self._side(self._entry_or_anchor(pool), Tier.HOST).alloc(count)
        if slots is None:
            return None
        self._sealed = self._sealed or count > 0
        return HostSlots(slots)

    def free(self, slots: HostSlots, pool: PoolName | None = None) -> None:
        """Takes host slots of a pool (by default the anchor) back."""
        self._require_open()
        self._side(self._entry_or_anchor(pool), Tier.HOST).free(slots)

    def reserve(self, demand: Mapping[PoolName, int], tier: Tier) -> Reservation | None:
        """Takes the slots that `demand` names in every pool, or none.

        None is a shortage. One that evicting can't mend evicts nothing. Otherwise pools are reclaimed once each,
        the anchor first, then in the order of registration; each is asked again how much it has before its
        turn, since evicting from one pool may free slots of another. When an evict function raises, nothing
        is taken and the error goes on.
        """
        self._require_open()
        wanted = self._wanted(demand, tier)
        short = [name for name, side, count in wanted if count and count > side.available() + side.evictable()]
        if short:
            self._counter.refused(short, tier)
            return None
        for name, side, count in wanted:
            if side.available() < count:
                self._reclaim(name, side, count, tier)
        return self._take(wanted, tier)

    def resolve_host_transfers(
        self,
        transfers: Sequence[PoolTransfer],
        *,
        primary_device_indices: DeviceSlots | None,
        primary_host_indices: HostSlots | None,
    ) -> tuple[PoolTransfer, ...] | None:
        """The transfers with host slots for every page that has a device slot, or None on a shortage: all or nothing.

        A transfer that has host slots keeps them. A derived one gets its source's slots: those of a transfer in this
        call, else, when the source is the anchor, the primary ones. Raises ConfigError or InvariantError, by
        name and with nothing taken, for a pool that is not registered or a source that is not at hand.
        """
        primary = PoolTransfer(self.anchor_entry.name, primary_device_indices, primary_host_indices)
        return self._resolve(transfers, Tier.HOST, primary)

    def resolve_device_transfers(
        self,
        transfers: Sequence[PoolTransfer],
        *,
        primary_device_indices: DeviceSlots | None,
        primary_host_indices: HostSlots | None,
    ) -> tuple[PoolTransfer, ...] | None:
        """The transfers with device slots for every page that has a host slot: as `resolve_host_transfers`."""
        primary = PoolTransfer(self.anchor_entry.name, primary_device_indices, primary_host_indices)
        return self._resolve(transfers, Tier.DEVICE, primary)

    def release_transfers(self, transfers: Iterable[PoolTransfer]) -> None:
        """Frees the host slots of transfers, of one request or of many; a slot that several share is freed once.

        Derived transfers and holes are skipped. Raises InvariantError, with nothing freed, when a slot is not held.
        """
        self._require_open()
        slots = self._slots_to_release(transfers, Tier.HOST)
        for name, taken in slots.items():
            self._entries[name].host_pool.require_held(HostSlots(taken))
        self._give_back(slots, Tier.HOST)

    def release_device_transfers(self, transfers: Iterable[PoolTransfer]) -> None:
        """Frees the device slots of transfers: as `release_transfers`, by each entry's `device_free_fn`."""
        self._require_open()
        self._give_back(self._slots_to_release(transfers, Tier.DEVICE), Tier.DEVICE)

    def counts(self) -> GroupCounts:
        """How reservations went until now."""
        return self._counter.snapshot()

    # Life

    def check(self) -> None:
        """Raises InvariantError unless every host slot of every pool is exactly one of free and held."""
        for entry in self._entries.values():
            entry.host_pool.check()
            if entry.derived_from is not None and len(entry.host_pool.taken()):
                raise InvariantError(f"derived pool {entry.name!r} has slots of its own: {entry.host_pool.taken()}")

    def close(self) -> None:
        """Destroys every host pool once and returns the memory; closing again does nothing, later use raises."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as pools:
            for entry in self._entries.values():
                pools.callback(entry.host_pool.close)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the pool group was closed; build a new cache")

    def _entry_or_anchor(self, name: PoolName | None) -> PoolEntry:
        return self.anchor_entry if name is None else self.get_entry(name)

    def _side(self, entry: PoolEntry, tier: Tier) -> SlotSide:
        side = self._sides.get((entry.name, tier))
        if side is None:
            side = self._sides[entry.name, tier] = entry.side(tier)
        return side

    def _wanted(self, demand: Mapping[PoolName, int], tier: Tier) -> list[tuple[PoolName, SlotSide, int]]:
        for name, count in demand.items():
            self.get_entry(name)
            if count < 0:
                raise InvariantError(f"{count} slots asked of pool {name!r}")
        ordered = [entry for entry in self._ordered if entry.name in demand]
        return [(entry.name, self._side(entry, tier), demand[entry.name]) for entry in ordered]

    def _reclaim(self, name: PoolName, side: SlotSide, count: int, tier: Tier) -> None:
        before = side.available()
        try:
            side.evict(count)
        except BaseException:
            self._counter.rolled_back(name, tier)
            raise
        finally:
            self._counter.reclaimed(name, tier, side.available() - before)

    def _take(self, wanted: Sequence[tuple[PoolName, SlotSide, int]], tier: Tier) -> Reservation | None:
        taken: dict[PoolName, Int32Array] = {}
        with ExitStack() as rollback:
            for name, side, count in wanted:
                slots = self._alloc(name, side, count, tier)
                if slots is None:
                    return None
                rollback.callback(side.free, slots)
                if len(slots) != count:
                    raise InvariantError(f"pool {name!r} gave {len(slots)} {tier.value} slots for {count}")
                taken[name] = slots
            rollback.pop_all()
        if any(count for _, _, count in wanted):
            self._counter.met(tier)
            self._sealed = True
        return Reservation(taken, lambda slots: self._give_back(slots, tier))

    def _alloc(self, name: PoolName, side: SlotSide, count: int, tier: Tier) -> Int32Array | None:
        slots = None
        try:
            slots = side.alloc(count)
        finally:
            if slots is None:
                self._counter.rolled_back(name, tier)
        return slots

    def _give_back(self, slots: Mapping[PoolName, Int32Array], tier: Tier) -> None:
        for name, taken in slots.items():
            self._side(self._entries[name], tier).free(taken)

    def _resolve(
        self, transfers: Sequence[PoolTransfer], tier: Tier, primary: PoolTransfer
    ) -> tuple[PoolTransfer, ...] | None:
        self._require_open()
        resolution = plan_resolution(transfers, tier, primary, self._entries)
        reservation = self.reserve(resolution.demand, tier)
        if reservation is None:
            return None
        with reservation:
            resolved = resolution.apply(reservation.slots)
            reservation.commit()
        return resolved

    def _slots_to_release(self, transfers: Iterable[PoolTransfer], tier: Tier) -> dict[PoolName, Int32Array]:
        found: dict[PoolName, list[Int32Array]] = {}
        for transfer in transfers:
            slots = transfer.slots_on(tier)
            if slots is not None and self.get_entry(transfer.name).derived_from is None:
                found.setdefault(transfer.name, []).append(without_holes(slots))
        return {name: np.unique(np.concatenate(parts)) for name, parts in found.items()}


def _anchor_first(entries: Iterable[PoolEntry]) -> tuple[PoolEntry, ...]:
    return tuple(sorted(entries, key=lambda entry: not entry.is_primary_index_anchor))
