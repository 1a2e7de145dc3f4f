"""Steps of requests, transfers and a cache over one group; a seed says what each does, and a model what comes of it."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from hicache.pools import PoolTransfer, plan_backup, plan_load
from hicache.units import HOLE, Int32Array, Tier
from tests.pools.device_bytes import write_page
from tests.pools.flight_state import TIERS, FlightState
from tests.pools.flights import OTHER, Flight, Good, Watch, backup_steps, load_steps, present
from tests.pools.group_model import Plan, ReclaimError, reserve
from tests.pools.holders import PAGE, Holder, kept_pages, values, without

MODES = ["well-behaved", "well-behaved", "raises before", "raises after", "idle", "idle"]
Taken = TypeVar("Taken")


class FlightDriver(FlightState):
    """What may happen, one method a step; each step may be given any seed at any time."""

    # Steps: what requests, transfers and the cache do

    def compute(self, seed: int) -> None:
        """A request takes slots and writes them; it may share the first pages of another."""
        dice = random.Random(seed)
        bases = [*self.holders[Tier.DEVICE], None]
        base = dice.choice(bases)
        shared, new = dice.randint(0, base.pages) if base is not None else 0, dice.randint(1, 5)
        wanted = {}
        for name in self.names:
            snapshots = np.array([dice.random() < 0.2 for _ in range(shared + new)])
            wanted[name] = kept_pages(self._coverage(name), shared + new, snapshots)[shared:]
        taken = self._take({name: int(kept.sum()) for name, kept in wanted.items()})
        if taken is None:
            return
        runs = {}
        for name, kept in wanted.items():
            fresh = np.full(new, HOLE, np.int32)
            fresh[kept] = taken[name]
            runs[name] = np.concatenate([base.runs[name][:shared] if base is not None else fresh[:0], fresh])
            for member in self.members(name):
                self._write(member, taken[name], dice)
        self._add_holder(Tier.DEVICE, Holder(runs))

    def back_up(self, seed: int) -> None:
        """A backup of some pools and pages of a holder begins."""
        self._begin(Tier.DEVICE, random.Random(seed))

    def load(self, seed: int) -> None:
        """A load of some pools and pages of a host copy begins, into slots that are taken now."""
        self._begin(Tier.HOST, random.Random(seed))

    def run(self, seed: int) -> None:
        """Transfers go on by some steps; what has ended is settled."""
        self._settle(self.executor.run(seed, 1 + seed % 12))

    def release(self, seed: int) -> None:
        """Some requests end, as one group or one by one."""
        dice = random.Random(seed)
        tier = dice.choice(TIERS)
        there = self.holders[tier]
        gone = dice.sample(there, min(len(there), dice.randint(1, 4)))
        for group in [gone] if dice.random() < 0.5 else [[holder] for holder in gone]:
            self._end(tier, group, dice)

    def slide(self, seed: int) -> None:
        """A request goes on: pages fall behind its windows, and older snapshots go."""
        dice = random.Random(seed)
        tier = dice.choice(TIERS)
        if not self.holders[tier]:
            return
        holder = dice.choice(self.holders[tier])
        gone = {}
        for name in self.names:
            run = holder.runs[name]
            passed = self._coverage(name).required(len(run), PAGE).start
            gone[name] = run[:passed].copy()
            run[:passed] = HOLE
        self.holders[tier] = [each for each in self.holders[tier] if not each.empty]
        self._give_up(tier, [gone], dice)

    def cache(self, seed: int) -> None:
        """What a holder alone holds may be evicted from now on, unless it is in flight."""
        dice = random.Random(seed)
        tier = dice.choice(TIERS)
        if not self.holders[tier]:
            return
        holder = dice.choice(self.holders[tier])
        self.holders[tier].remove(holder)
        for name in self.names:
            self.cached[name, tier] += sorted(holder.slots(name) - self._used(name, tier))

    def crowd(self, seed: int) -> None:
        """All that is free in some pools is in the cache now: whoever needs slots has to evict."""
        dice = random.Random(seed)
        tier = dice.choice(TIERS)
        for name in self.names:
            count = max(0, self._free_counts()[name, tier] - dice.choice([0, 0, 1, 20]))
            slots = self.group.alloc(count, name) if tier is Tier.HOST else self.allocators[name].alloc(count)
            assert slots is not None
            self.cached[name, tier] += slots.tolist()

    def change_reclaim(self, seed: int) -> None:
        """Eviction behaves otherwise from now on: it reaches other pools, raises, or does nothing."""
        dice = random.Random(seed)
        mode = dice.choice(MODES)
        bad = {(name, tier) for name in self.names if dice.random() < 0.5 for tier in TIERS}
        self.plan = Plan(
            {
                name: tuple(other for other in self.names if other != name and dice.random() < 0.3)
                for name in self.names
            },
            raises_before=bad if mode == "raises before" else set(),
            raises_after=bad if mode == "raises after" else set(),
            idle=bad if mode == "idle" else set(),
        )

    def close(self) -> None:
        """All transfers end, the lost ones too; all that is held goes; then every slot is free."""
        self._settle(self.executor.close(0))
        self.check()
        for tier in TIERS:
            self._end(tier, list(self.holders[tier]), random.Random(1))
            for name in self.names:
                self._drop_cached((name, tier), self.evictable((name, tier)))
                assert self._taken_real(name, tier) == []
        self.group.close()

    # Taking

    def _take(self, demand: Mapping[str, int]) -> Mapping[str, Int32Array] | None:
        reservation = self._expecting(demand, Tier.DEVICE, lambda: self.group.reserve(demand, Tier.DEVICE))
        if reservation is None:
            return None
        with reservation:
            return reservation.commit()

    def _expecting(self, demand: Mapping[str, int], tier: Tier, call: Callable[[], Taken | None]) -> Taken | None:
        """Runs a call that takes `demand`, and compares what it does to counts with the model."""
        expected = reserve(demand, tier, self.names, self.plan, self._free_counts(), self._evictable_counts())
        self.asked.clear()
        result: Taken | None = None
        try:
            result = call()
        except ReclaimError:
            assert expected.raises
        else:
            assert not expected.raises and (result is None) == expected.shortage
        assert self.asked == expected.asked
        assert self._free_counts() == expected.free
        assert self._evictable_counts() == expected.cached
        return result

    def _begin(self, source: Tier, dice: random.Random) -> None:
        if not self.holders[source]:
            return
        holder = dice.choice(self.holders[source])
        chosen = [name for name in self.names if dice.random() < 0.8] or self.names[:1]
        tail_only = dice.random() < 0.5
        transfers = [
            PoolTransfer(name).with_slots(source, self._some_pages(holder, name, tail_only, dice)) for name in chosen
        ]
        transfers += self.group.derived_transfers(chosen)
        dice.shuffle(transfers)
        resolved = self._resolve(transfers, source)
        if resolved is not None:
            self._submit(self._shuffled(resolved, OTHER[source], dice), source)

    def _some_pages(self, holder: Holder, name: str, tail_only: bool, dice: random.Random) -> Int32Array:
        run = holder.runs[name].copy()
        if tail_only:
            run[: self._coverage(name).required(len(run), PAGE).start] = HOLE
        run[[dice.random() < 0.1 for _ in run]] = HOLE
        return run

    def _resolve(self, transfers: Sequence[PoolTransfer], source: Tier) -> tuple[PoolTransfer, ...] | None:
        to = OTHER[source]
        own = [transfer for transfer in transfers if transfer.name in self.names]
        demand = {transfer.name: len(present(values(transfer, source))) for transfer in own}
        frozen = [repr(transfer) for transfer in transfers]
        call = self.group.resolve_host_transfers if to is Tier.HOST else self.group.resolve_device_transfers
        resolved = self._expecting(
            demand, to, lambda: call(transfers, primary_device_indices=None, primary_host_indices=None)
        )
        assert [repr(transfer) for transfer in transfers] == frozen
        return resolved

    def _shuffled(
        self, resolved: tuple[PoolTransfer, ...], tier: Tier, dice: random.Random
    ) -> tuple[PoolTransfer, ...]:
        """The slots that were taken, in any order: the same for all that live at them."""
        runs = {}
        for transfer in resolved:
            if transfer.name in self.names:
                run = runs[transfer.name] = values(transfer, tier).copy()
                run[run != HOLE] = dice.sample(present(run).tolist(), len(present(run)))
        return tuple(each.with_slots(tier, runs[self._source(each.name)]) for each in resolved)

    def _submit(self, resolved: tuple[PoolTransfer, ...], source: Tier) -> None:
        content = {
            each.name: [self.pages.of(each.name, source)[slot] for slot in present(values(each, source)).tolist()]
            for each in resolved
        }
        flight = Flight(OTHER[source], resolved, content)
        if source is Tier.DEVICE:
            flight.steps = backup_steps(plan_backup(self.group, resolved))
        else:
            watched = [Watch(self.group.get_entry(each.name), each.pairs()[0], content[each.name]) for each in resolved]
            flight.steps = load_steps(plan_load(self.group, resolved), watched)
        self.executor.submit(flight)

    def _write(self, member: str, slots: Int32Array, dice: random.Random) -> None:
        entry = self.group.get_entry(member)
        for slot in slots.tolist():
            content = dice.randbytes(entry.host_pool.layout.page_bytes)
            write_page(entry, Tier.DEVICE, slot, np.frombuffer(content, np.uint8))
            self.pages.of(member, Tier.DEVICE)[slot] = content

    # Settling

    def _settle(self, ended: Sequence[tuple[Flight, Good]]) -> None:
        for flight, good in ended:
            runs, bad = self._arrived(flight, good)
            self._group_release(flight.to, [bad], random.Random(0))
            self._add_holder(flight.to, Holder(runs))
        for tier in TIERS:
            self._free_waiting(tier)

    def _arrived(self, flight: Flight, good: Good) -> tuple[dict[str, Int32Array], dict[str, Int32Array]]:
        """Per pool the new slots of pages that came whole, with all that lives at them, and those of the rest."""
        by_name = {transfer.name: transfer for transfer in flight.transfers}
        pages = max(len(values(transfer, flight.to)) for transfer in flight.transfers)
        runs = {name: np.full(pages, HOLE, np.int32) for name in self.names}
        bad = {}
        for name in [name for name in self.names if name in by_name]:
            run = values(by_name[name], flight.to)
            slots = present(run)
            whole = np.ones(len(slots), np.bool_)
            for member in self.members(name):
                whole &= good.get(member, np.zeros(len(slots), np.bool_))
            bad[name] = slots[~whole]
            runs[name] = without(run, set(bad[name].tolist()))
            for member in self.members(name):
                content = zip(slots.tolist(), whole, flight.content[member], strict=True)
                self.pages.of(member, flight.to).update({slot: page for slot, right, page in content if right})
        return runs, bad


STEPS: dict[Callable[[FlightDriver, int], None], int] = {
    FlightDriver.compute: 6,
    FlightDriver.back_up: 5,
    FlightDriver.load: 5,
    FlightDriver.run: 8,
    FlightDriver.release: 3,
    FlightDriver.slide: 3,
    FlightDriver.cache: 2,
    FlightDriver.crowd: 1,
    FlightDriver.change_reclaim: 2,
}
"""What a driver can do, and how often it does so on a walk."""


def walk(driver: FlightDriver, seed: int, steps: int) -> None:
    """Steps that `seed` chooses, each checked."""
    dice = random.Random(seed)
    for step in dice.choices(list(STEPS), list(STEPS.values()), k=steps):
        step(driver, dice.randrange(2**32))
        driver.check()
