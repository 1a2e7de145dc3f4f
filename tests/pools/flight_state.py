"""A group with transfers in flight beside a plain model: who holds which slots, what is in them, how they go back."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hicache.coverage import Coverage
from hicache.pools import HostPoolGroup, PoolEntry, PoolTransfer, SlotAllocator, plan_backup
from hicache.units import HOLE, HostSlots, Int32Array, Tier
from tests.pools.device_bytes import read_pages
from tests.pools.flights import Fates, LateExecutor
from tests.pools.group_model import Plan, ReclaimError, Side, evicted
from tests.pools.holders import Holder, Pages, held, make_entry, without

TIERS = (Tier.HOST, Tier.DEVICE)


class FlightState:
    """Slots are free, cached, held by requests, in flight, or wait for a flight to end before they are freed.

    `patient`: slots in flight are freed only once the flight has settled, as they must be.
    """

    def __init__(self, seed: int, *, patient: bool = True, fates: Fates | None = None) -> None:
        dice = random.Random(seed)
        self.patient = patient
        self.holders: dict[Tier, list[Holder]] = {tier: [] for tier in TIERS}
        self.cached: dict[Side, list[int]] = {}
        self.waiting: dict[Side, set[int]] = {}
        self.asked: list[tuple[Side, int]] = []
        self.allocators: dict[str, SlotAllocator] = {}
        self.plan = Plan()
        layers = dice.randint(1, 4)
        self.group = HostPoolGroup(layers)
        all_staged = dice.random() < 0.5
        made: list[PoolEntry] = []
        for index in range(dice.randint(1, 5)):
            made.append(self._add_entry(dice, f"pool{index}", layers, made, all_staged or dice.random() < 0.7))
        self.names = [entry.name for entry in self.group.entries if entry.derived_from is None]
        self.pages = Pages([entry.name for entry in made])
        self.executor = LateExecutor(self.group, fates if fates is not None else Fates())

    def _add_entry(
        self, dice: random.Random, name: str, layers: int, before: Sequence[PoolEntry], staged: bool
    ) -> PoolEntry:
        own = [entry for entry in before if entry.derived_from is None]
        source = dice.choice([None, None, *own])
        made = make_entry(dice, name, layers, source, staged=staged)
        if source is None:
            made = self._with_functions(made)
        self.group.add_entry(made)
        wanted = all(entry.host_pool.capabilities.staged_write_back is True for entry in (*before, made))
        assert plan_backup(self.group, []).staged == wanted
        return made

    def _with_functions(self, entry: PoolEntry) -> PoolEntry:
        name = entry.name
        self.allocators[name] = SlotAllocator(entry.device_pool.slots)
        for tier in TIERS:
            self.cached[name, tier] = []
            self.waiting[name, tier] = set()
        return replace(
            entry.with_device_allocator(self.allocators[name]),
            host_evict_fn=lambda count: self._evict((name, Tier.HOST), count),
            host_evictable_fn=lambda: len(self.evictable((name, Tier.HOST))),
            device_evict_fn=lambda count: self._evict((name, Tier.DEVICE), count),
            device_evictable_fn=lambda: len(self.evictable((name, Tier.DEVICE))),
        )

    # What must be so

    def check(self) -> None:
        """Raises unless every slot has exactly one owner, and every byte that is known is there."""
        self.group.check()
        for name in self.names:
            self.allocators[name].check()
            for tier in TIERS:
                self._check_owners(name, tier)
        for entry in self.group.entries:
            for tier in TIERS:
                real = read_pages(entry, tier)
                for slot, content in self.pages.of(entry.name, tier).items():
                    assert real[slot].tobytes() == content, f"slot {slot} of {entry.name} in {tier}"

    def _check_owners(self, name: str, tier: Tier) -> None:
        cached, waiting, flying = self.cached[name, tier], self.waiting[name, tier], self.flying(name, tier)
        assert len(set(cached)) == len(cached)
        assert not held(self.holders[tier], name) & set(cached)
        assert waiting <= flying and not waiting & self._used(name, tier)
        assert sorted(self._used(name, tier) | waiting | flying) == self._taken_real(name, tier)

    # Who has what

    def members(self, name: str) -> list[str]:
        """A pool and those that live at its slots."""
        return [entry.name for entry in self.group.entries if name in (entry.name, entry.derived_from)]

    def flying(self, name: str, tier: Tier) -> set[int]:
        """Slots that transfers may still touch."""
        return {slot for flight in self.executor.flights for slot in flight.slots(name, tier)}

    def evictable(self, side: Side) -> list[int]:
        """Cached slots that nothing touches."""
        flying = self.flying(*side)
        return [slot for slot in self.cached[side] if slot not in flying]

    def _source(self, name: str) -> str:
        return self.group.get_entry(name).derived_from or name

    def _coverage(self, name: str) -> Coverage:
        return self.group.get_entry(name).coverage

    def _used(self, name: str, tier: Tier) -> set[int]:
        """Slots that stay when somebody who holds them goes."""
        return held(self.holders[tier], name) | set(self.cached[name, tier])

    def _taken_real(self, name: str, tier: Tier) -> list[int]:
        pool = self.group.get_pool(name) if tier is Tier.HOST else self.allocators[name]
        return [int(slot) for slot in pool.taken()]

    def _evictable_counts(self) -> dict[Side, int]:
        return {side: len(self.evictable(side)) for side in self.cached}

    def _free_counts(self) -> dict[Side, int]:
        return {
            (name, tier): (self.group.get_pool(name) if tier is Tier.HOST else self.allocators[name]).available
            for name in self.names
            for tier in TIERS
        }

    def _add_holder(self, tier: Tier, holder: Holder) -> None:
        if not holder.empty:
            self.holders[tier].append(holder)

    # Bytes

    def _forget(self, name: str, tier: Tier, slots: Sequence[int]) -> None:
        for member in self.members(name):
            for slot in slots:
                self.pages.of(member, tier).pop(slot, None)

    # Giving back

    def _free_waiting(self, tier: Tier) -> None:
        """What was given up while it was in flight goes now, if nothing touches it any more."""
        gone = {}
        for name in self.names:
            ready = self.waiting[name, tier] - self.flying(name, tier)
            self.waiting[name, tier] -= ready
            gone[name] = np.array(sorted(ready), np.int32)
        self._group_release(tier, [gone], random.Random(0))

    def _end(self, tier: Tier, group: Sequence[Holder], dice: random.Random) -> None:
        self.holders[tier] = [holder for holder in self.holders[tier] if holder not in group]
        self._give_up(tier, [holder.runs for holder in group], dice)

    def _give_up(self, tier: Tier, runs: Sequence[Mapping[str, Int32Array]], dice: random.Random) -> None:
        """Frees what nobody else uses; what is in flight goes when that is over."""
        kept = {}
        for name in self.names:
            flying = self.flying(name, tier) if self.patient else set()
            given = {int(slot) for run in runs for slot in run[name]} - {HOLE}
            self.waiting[name, tier] |= (given & flying) - self._used(name, tier)
            kept[name] = self._used(name, tier) | flying
        left = [{name: without(run, kept[name]) for name, run in each.items()} for each in runs]
        self._group_release(tier, left, dice)

    def _group_release(self, tier: Tier, gone: Sequence[Mapping[str, Int32Array]], dice: random.Random) -> None:
        """Frees runs of many requests in one call; holes, shared slots and derived pools are in it."""
        transfers = [
            PoolTransfer(member).with_slots(tier, run)
            for runs in gone
            for name, run in runs.items()
            for member in self.members(name)
        ]
        dice.shuffle(transfers)
        expected = self._free_counts()
        call = self.group.release_transfers if tier is Tier.HOST else self.group.release_device_transfers
        call(transfers)
        for name in self.names:
            slots = {int(slot) for runs in gone for slot in runs.get(name, [])} - {HOLE}
            self._forget(name, tier, sorted(slots))
            expected[name, tier] += len(slots)
        assert self._free_counts() == expected

    def _evict(self, side: Side, count: int) -> None:
        self.asked.append((side, count))
        if side in self.plan.raises_before:
            raise ReclaimError
        if side not in self.plan.idle:
            for gone, number in evicted(side, count, self.plan, self._free_counts(), self._evictable_counts()).items():
                self._drop_cached(gone, self.evictable(gone)[:number])
        if side in self.plan.raises_after:
            raise ReclaimError

    def _drop_cached(self, side: Side, slots: Sequence[int]) -> None:
        name, tier = side
        self.cached[side] = [slot for slot in self.cached[side] if slot not in slots]
        self._forget(name, tier, slots)
        if tier is Tier.HOST:
            self.group.get_pool(name).free(HostSlots(np.array(slots, np.int32)))
        else:
            self.allocators[name].free(np.array(slots, np.int32))
