"""The group of two to six pools beside a plain model: after every step each slot is exactly one of free and held."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache.device.array import ArrayDevicePool
from hicache.errors import ConfigError, InvariantError
from hicache.layout import PoolGeometry, TensorSpec
from hicache.pools import HostPoolGroup, PoolEntry, PoolTransfer, SlotAllocator, plan_backup, plan_load
from hicache.units import HOLE, DeviceSlots, HostSlots, Int32Array, Tier
from tests.pools.group_model import Plan, ReclaimError, Side, evicted, reserve
from tests.pools.helpers import LAYERS, device_slots, entry, group

GEOMETRIES = [
    PoolGeometry.uniform(LAYERS, [TensorSpec("k", (2,), "float16"), TensorSpec("v", (2,), "float16")], 2),
    PoolGeometry.uniform(LAYERS, [TensorSpec("state", (3,), "uint8")], 1),
]
DRAFT = PoolGeometry.uniform(2, [TensorSpec("k", (3,), "uint8")], 2)
TIERS = (Tier.HOST, Tier.DEVICE)
OTHER = {Tier.HOST: Tier.DEVICE, Tier.DEVICE: Tier.HOST}
tiers = st.sampled_from(TIERS)


class GroupMachine(RuleBasedStateMachine):
    """Slots are free, cached (a reclaim may take them), or lent to a batch of requests that is released as one."""

    group: HostPoolGroup

    def __init__(self) -> None:
        super().__init__()
        self.ever_took = False

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.cached: dict[Side, list[int]] = {}
        self.asked: list[tuple[Side, int]] = []
        self.lent: dict[Tier, list[list[PoolTransfer]]] = {tier: [] for tier in TIERS}
        self.allocators: dict[str, SlotAllocator] = {}
        self.plan = Plan()
        entries: list[PoolEntry] = []
        for index in range(data.draw(st.integers(2, 6), label="pools")):
            entries.append(self.make_entry(data, f"pool{index}", entries))
        own = [each for each in entries if each.derived_from is None]
        marked = data.draw(st.none() | st.sampled_from(own).map(lambda each: each.name), label="marked as anchor")
        self.group = group(*(replace(each, is_primary_index_anchor=each.name == marked) for each in entries))
        self.names = [each.name for each in own]
        anchor = own[0].name if marked is None else marked
        self.order = [anchor, *(name for name in self.names if name != anchor)]
        self.derived = {each.name: each.derived_from for each in entries if each.derived_from is not None}

    def make_entry(self, data: st.DataObject, name: str, before: Sequence[PoolEntry]) -> PoolEntry:
        own = [each for each in before if each.derived_from is None]
        source = data.draw(st.sampled_from([*own, None]), label=f"source of {name}") if own else None
        drafts = [DRAFT] * data.draw(st.integers(0, 2), label=f"drafts packed in {name}")
        size = data.draw(st.integers(1, 8), label=f"slots of {name}")
        geometry = data.draw(st.sampled_from(GEOMETRIES))
        if source is not None:
            size = source.host_pool.slots
            return entry(
                name, slots=size, device_slots=size, geometry=geometry, drafts=drafts, derived_from=source.name
            )
        made = entry(name, slots=size, device_slots=size, geometry=geometry, drafts=drafts)
        self.allocators[name] = SlotAllocator(size)
        self.cached |= {(name, tier): [] for tier in TIERS}
        return replace(
            made.with_device_allocator(self.allocators[name]),
            host_evict_fn=lambda count: self.evict((name, Tier.HOST), count),
            host_evictable_fn=lambda: len(self.cached[name, Tier.HOST]),
            device_evict_fn=lambda count: self.evict((name, Tier.DEVICE), count),
            device_evictable_fn=lambda: len(self.cached[name, Tier.DEVICE]),
        )

    # The engine's side: reclaim, as a tree does it

    def evict(self, side: Side, count: int) -> None:
        self.asked.append((side, count))
        if side in self.plan.raises_before:
            raise ReclaimError
        if side not in self.plan.idle:
            for gone, number in evicted(side, count, self.plan, self.free_counts(), self.cached_counts()).items():
                self.free_real(gone, [self.cached[gone].pop(0) for _ in range(number)])
        if side in self.plan.raises_after:
            raise ReclaimError

    def free_real(self, side: Side, slots: Sequence[int]) -> None:
        name, tier = side
        array = np.array(slots, np.int32)
        if tier is Tier.HOST:
            self.group.get_pool(name).free(HostSlots(array))
        else:
            self.allocators[name].free(array)

    def taken_real(self, side: Side) -> list[int]:
        name, tier = side
        held = self.group.get_pool(name).taken() if tier is Tier.HOST else self.allocators[name].taken()
        return [int(slot) for slot in held]

    def size(self, name: str) -> int:
        return self.allocators[name].size

    # What must be so

    def lent_slots(self, side: Side) -> set[int]:
        name, tier = side
        held: set[int] = set()
        for batch in self.lent[tier]:
            for transfer in batch:
                slots = transfer.slots_on(tier)
                if transfer.name == name and slots is not None:
                    held |= {int(slot) for slot in slots if slot != HOLE}
        return held

    def cached_counts(self) -> dict[Side, int]:
        return {side: len(slots) for side, slots in self.cached.items()}

    def free_counts(self) -> dict[Side, int]:
        return {side: self.size(side[0]) - len(self.taken_real(side)) for side in self.cached}

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        self.group.check()
        for side, cached in self.cached.items():
            self.allocators[side[0]].check()
            lent = self.lent_slots(side)
            assert not lent & set(cached)
            assert sorted(lent | set(cached)) == self.taken_real(side)
        for name in self.derived:
            assert self.group.get_pool(name).available == self.group.get_pool(name).slots

    # Rules

    @rule(data=st.data(), mode=st.sampled_from(["well-behaved", "raises before", "raises after", "idle"]))
    def change_reclaim(self, data: st.DataObject, mode: str) -> None:
        reach = self.reach(data)
        bad = {(name, tier) for name in data.draw(st.sets(st.sampled_from(self.names), min_size=1)) for tier in TIERS}
        none: set[Side] = set()
        self.plan = Plan(
            reach,
            raises_before=bad if mode == "raises before" else none,
            raises_after=bad if mode == "raises after" else none,
            idle=bad if mode == "idle" else none,
        )

    def reach(self, data: st.DataObject) -> dict[str, tuple[str, ...]]:
        """For each pool, the others that evicting from it evicts from too."""
        others = st.sets(st.sampled_from(self.names), max_size=3)
        return {name: tuple(sorted(data.draw(others) - {name})) for name in self.names}

    @rule(data=st.data(), tier=tiers)
    def fill_cache(self, data: st.DataObject, tier: Tier) -> None:
        for name in data.draw(st.sets(st.sampled_from(self.names), min_size=1).map(sorted)):
            count = max(0, self.free_counts()[name, tier] - data.draw(st.integers(0, 3), label="left free"))
            self.fill(name, tier, count)

    def fill(self, name: str, tier: Tier, count: int) -> None:
        pool = None if name == self.order[0] else name
        slots = self.group.alloc(count, pool) if tier is Tier.HOST else self.allocators[name].alloc(count)
        assert slots is not None
        self.cached[name, tier] += slots.tolist()
        self.ever_took |= tier is Tier.HOST and count > 0

    @rule(data=st.data(), tier=tiers, ending=st.sampled_from(["commit", "leave", "raise"]))
    def reserve(self, data: st.DataObject, tier: Tier, ending: str) -> None:
        named = data.draw(st.permutations(self.names))[: data.draw(st.integers(1, 4))]
        self.check_reserve({name: data.draw(st.integers(0, self.size(name) + 1)) for name in named}, tier, ending)

    @rule(data=st.data(), tier=tiers)
    def reserve_in_full_pools(self, data: st.DataObject, tier: Tier) -> None:
        """Every pool is full of cached pages; evicting from one may free some of another, or nothing at all."""
        for name in self.names:
            self.fill(name, tier, self.free_counts()[name, tier])
        idle = data.draw(st.none() | st.sampled_from(self.names))
        self.plan = Plan(self.reach(data), idle=set() if idle is None else {(idle, tier)})
        self.check_reserve(dict.fromkeys(self.names, 1), tier, "commit")

    def check_reserve(self, demand: Mapping[str, int], tier: Tier, ending: str) -> None:
        expected = reserve(demand, tier, self.order, self.plan, self.free_counts(), self.cached_counts())
        self.asked.clear()
        try:
            reservation = self.group.reserve(demand, tier)
        except ReclaimError:
            assert expected.raises
            reservation = None
        else:
            assert not expected.raises
            assert (reservation is None) == expected.shortage
        assert (self.asked, self.free_counts(), self.cached_counts()) == (
            expected.asked,
            expected.free,
            expected.cached,
        )
        if reservation is None:
            return
        self.ever_took |= sum(demand.values()) > 0
        if ending == "commit":
            for name, slots in reservation.commit().items():
                self.cached[name, tier] += slots.tolist()
            return
        try:
            with reservation:
                if ending == "raise":
                    raise ReclaimError
        except ReclaimError:
            pass
        assert self.free_counts() == {
            side: count + (demand.get(side[0], 0) if side[1] is tier else 0) for side, count in expected.free.items()
        }

    @rule(data=st.data(), tier=tiers)
    def resolve(self, data: st.DataObject, tier: Tier) -> None:
        listed = self.listed(data)
        transfers = [self.unresolved(data, name, tier) for name in listed]
        primary = self.primary(data)
        demand = {
            each.name: int(np.count_nonzero(slots != HOLE))
            for each in transfers
            if (slots := each.slots_on(OTHER[tier])) is not None
        }
        expected = reserve(demand, tier, self.order, self.plan, self.free_counts(), self.cached_counts())
        orphans = [
            name
            for name, source in self.derived.items()
            if name in listed and source not in listed and source != self.order[0]
        ]
        before, frozen = self.free_counts(), [repr(transfer) for transfer in transfers]
        self.asked.clear()
        call = self.group.resolve_host_transfers if tier is Tier.HOST else self.group.resolve_device_transfers
        resolved = None
        try:
            resolved = call(
                transfers, primary_device_indices=primary.device_slots, primary_host_indices=primary.host_slots
            )
        except ConfigError as error:
            assert orphans and any(name in str(error) for name in orphans)
            assert (self.asked, self.free_counts()) == ([], before)
            return
        except ReclaimError:
            assert expected.raises
        else:
            assert not orphans and not expected.raises
            assert (resolved is None) == expected.shortage
        assert [repr(transfer) for transfer in transfers] == frozen
        assert (self.asked, self.free_counts(), self.cached_counts()) == (
            expected.asked,
            expected.free,
            expected.cached,
        )
        if resolved is not None:
            self.ever_took |= sum(demand.values()) > 0
            self.check_resolved(transfers, resolved, primary, tier)
            self.lent[tier].append([each for each in resolved if self.derived.get(each.name) != self.order[0]])

    def subset(self, data: st.DataObject, names: Sequence[str]) -> list[str]:
        return [name for name in names if data.draw(st.booleans(), label=name)]

    def listed(self, data: st.DataObject) -> list[str]:
        """Names in any order; one in eight calls may leave out the source of a derived pool."""
        own = self.subset(data, self.names)
        careless = data.draw(st.integers(0, 7), label="careless") == 7
        sources = self.names if careless else [*own, self.order[0]]
        derived = self.subset(data, [name for name, source in self.derived.items() if source in sources])
        return data.draw(st.permutations([*own, *derived]))

    def unresolved(self, data: st.DataObject, name: str, tier: Tier) -> PoolTransfer:
        if name in self.derived:
            return PoolTransfer(name)
        size = self.size(name)
        known = data.draw(st.permutations(range(size)))[: data.draw(st.integers(0, 4))]
        pages = [HOLE if data.draw(st.integers(0, 4)) == 0 else slot for slot in known]
        return PoolTransfer(name).with_slots(OTHER[tier], np.array(pages, np.int32))

    def primary(self, data: st.DataObject) -> PoolTransfer:
        pairs = data.draw(st.permutations(range(self.size(self.order[0]))))[:2]
        slots = np.array(pairs, np.int32)
        return PoolTransfer(self.order[0], DeviceSlots(slots), HostSlots(slots))

    def check_resolved(
        self, given: Sequence[PoolTransfer], resolved: Sequence[PoolTransfer], primary: PoolTransfer, tier: Tier
    ) -> None:
        by_name = {primary.name: primary} | {each.name: each for each in resolved}
        assert [each.name for each in resolved] == [each.name for each in given]
        for before, after in zip(given, resolved, strict=True):
            after.pairs()
            source = by_name[self.derived.get(after.name, after.name)]
            assert np.array_equal(values(after, tier), values(source, tier))
            assert np.array_equal(values(after, OTHER[tier]), values(source, OTHER[tier]))
            if before.name not in self.derived:
                assert np.array_equal(values(after, OTHER[tier]), values(before, OTHER[tier]))

    @precondition(lambda self: self.lent[Tier.HOST] or self.lent[Tier.DEVICE])
    @rule(data=st.data(), tier=tiers)
    def share(self, data: st.DataObject, tier: Tier) -> None:
        """A second request of a batch uses some of the first one's slots; others are behind its window."""
        if not self.lent[tier]:
            return
        batch = self.lent[tier][data.draw(st.integers(0, len(self.lent[tier]) - 1))]
        for transfer in list(batch):
            slots = values(transfer, tier).copy()
            for page in range(len(slots)):
                if data.draw(st.integers(0, 3)) == 3:
                    slots[page] = HOLE
            batch.append(transfer.with_slots(tier, slots))

    @rule(data=st.data(), tier=tiers)
    def release(self, data: st.DataObject, tier: Tier) -> None:
        """Some batches, all their requests at once and in any order."""
        gone = data.draw(st.permutations(self.lent[tier]))[: data.draw(st.integers(1, 3))]
        together = data.draw(st.permutations([transfer for batch in gone for transfer in batch]))
        self.lent[tier] = [batch for batch in self.lent[tier] if not any(batch is other for other in gone)]
        if tier is Tier.HOST:
            self.group.release_transfers(together)
        else:
            self.group.release_device_transfers(together)

    @rule(data=st.data(), tier=tiers)
    def into_the_cache(self, data: st.DataObject, tier: Tier) -> None:
        """A batch's slots are inserted: the cache has them now."""
        if not self.lent[tier]:
            return
        batch = self.lent[tier].pop(data.draw(st.integers(0, len(self.lent[tier]) - 1)))
        self.lent[tier].append(batch)
        inserted = {name: self.lent_slots((name, tier)) for name in self.names}
        self.lent[tier].pop()
        for name, before in inserted.items():
            self.cached[name, tier] += sorted(before - self.lent_slots((name, tier)))

    @rule(data=st.data())
    def release_what_is_free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names))
        free = sorted(set(range(self.size(name))) - set(self.taken_real((name, Tier.HOST))))
        batches = [transfer for batch in self.lent[Tier.HOST] for transfer in batch]
        if not free:
            return
        wrong = PoolTransfer(name, None, HostSlots(np.array([data.draw(st.sampled_from(free))], np.int32)))
        before = self.free_counts()
        with pytest.raises(InvariantError):
            self.group.release_transfers([*batches, wrong])
        assert self.free_counts() == before

    def teardown(self) -> None:
        if self.ever_took:
            with pytest.raises(ConfigError, match="'late' comes too late"):
                self.group.add_entry(entry("late"))
            self.group.close()

    @rule(data=st.data(), seed=st.integers(0, 2**16))
    def round_trip(self, data: st.DataObject, seed: int) -> None:
        """Bytes of every pool and draft, by way of the host, into other device slots."""
        name = data.draw(st.sampled_from(self.names))
        count = data.draw(st.integers(0, self.size(name) // 2))
        order = data.draw(st.permutations(range(self.size(name))))
        at, to, rows = order[:count], order[count : 2 * count], order[::-1][:count]
        members = [name, *(transfer.name for transfer in self.group.derived_transfers([name]))]
        pools = [
            pool
            for each in map(self.group.get_entry, members)
            for pool in (each.device_pool, *each.packed_draft_device_pools)
        ]
        fill(pools, seed)
        host = HostSlots(np.array(rows, np.int32))
        expected = [pool.stage(device_slots(*at)) for pool in pools]
        plan_backup(self.group, [PoolTransfer(member, device_slots(*at), host) for member in members]).run()
        fill(pools, seed + 1)
        load = plan_load(self.group, [PoolTransfer(member, device_slots(*to), host) for member in members])
        for layer in range(LAYERS):
            load.run_layer(layer)
        for pool, staged in zip(pools, expected, strict=True):
            assert np.array_equal(pool.stage(device_slots(*to)), staged)


def values(transfer: PoolTransfer, tier: Tier) -> Int32Array:
    slots = transfer.slots_on(tier)
    assert slots is not None
    return slots


def fill(pools: Sequence[object], seed: int) -> None:
    random = np.random.default_rng(seed)
    for pool in pools:
        assert isinstance(pool, ArrayDevicePool)
        for layer, specs in enumerate(pool.geometry.layers):
            for tensor in range(len(specs)):
                memory = pool.tensor_bytes(layer, tensor)
                memory[...] = random.integers(0, 256, memory.shape, np.uint8)


TestGroupMachine = GroupMachine.TestCase
