"""Bugs that are planted in the pools are found by short walks of the flight driver, so it tests what it claims to."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from hicache.errors import InvariantError
from hicache.layout import PackedLayout
from hicache.pools import (
    HostPoolGroup,
    LayerCopy,
    LoadPlan,
    PoolCopy,
    PoolTransfer,
    Reservation,
    SlotAllocator,
    copies,
    group,
    plan_load,
    registration,
    resolve,
)
from hicache.units import HOLE, ByteRange, HostSlots, Int32Array, Tier
from tests.pools import flight_driver
from tests.pools.flight_driver import FlightDriver, walk

Patch = pytest.MonkeyPatch
Layers = tuple[tuple[LayerCopy, ...], ...]

SEEDS = range(60)
STEPS = 60


def is_found(*, patient: bool = True) -> bool:
    """Whether some walk fails."""
    return any(fails(seed, patient=patient) for seed in SEEDS)


def fails(seed: int, *, patient: bool = True) -> bool:
    try:
        driver = FlightDriver(seed, patient=patient)
        walk(driver, seed, STEPS)
        driver.close()
    except (AssertionError, InvariantError):
        return True
    return False


# Giving back


def hole_is_freed(patch: Patch) -> None:
    patch.setattr(group, "without_holes", lambda slots: slots)


def hole_is_freed_as_slot_0(patch: Patch) -> None:
    patch.setattr(group, "without_holes", lambda slots: np.maximum(slots, 0))


def page_after_a_hole_is_kept(patch: Patch) -> None:
    def until_a_hole(slots: Int32Array) -> Int32Array:
        present = slots != HOLE
        first = int(np.argmin(present)) if not present.all() else len(slots)
        return slots[:first]

    patch.setattr(group, "without_holes", until_a_hole)


def _to_release(patch: Patch, change: Callable[[Sequence[PoolTransfer]], Sequence[PoolTransfer]]) -> None:
    original = HostPoolGroup._slots_to_release
    patch.setattr(
        HostPoolGroup,
        "_slots_to_release",
        lambda self, transfers, tier: original(self, change(list(transfers)), tier),
    )


def one_request_of_a_group_is_kept(patch: Patch) -> None:
    _to_release(patch, lambda transfers: list({transfer.name: transfer for transfer in transfers}.values()))


def derived_slots_are_freed(patch: Patch) -> None:
    def slots(self: HostPoolGroup, transfers: Sequence[PoolTransfer], tier: Tier) -> dict[str, Int32Array]:
        found: dict[str, list[Int32Array]] = {}
        for transfer in transfers:
            run = transfer.slots_on(tier)
            assert run is not None
            found.setdefault(self.get_entry(transfer.name).derived_from or transfer.name, []).append(run[run != HOLE])
        return {name: np.concatenate(parts) for name, parts in found.items()}

    patch.setattr(HostPoolGroup, "_slots_to_release", slots)


def shared_slot_is_freed_twice(patch: Patch) -> None:
    def slots(self: HostPoolGroup, transfers: Sequence[PoolTransfer], tier: Tier) -> dict[str, Int32Array]:
        found: dict[str, list[Int32Array]] = {}
        for transfer in transfers:
            run = transfer.slots_on(tier)
            if run is not None and self.get_entry(transfer.name).derived_from is None:
                found.setdefault(transfer.name, []).append(run[run != HOLE])
        return {name: np.concatenate(parts) for name, parts in found.items()}

    patch.setattr(HostPoolGroup, "_slots_to_release", slots)


def committed_slots_are_freed(patch: Patch) -> None:
    """What a transfer in flight took is free while it is under way."""
    patch.setattr(Reservation, "__exit__", lambda self, *_: self._free(self._slots))


# Taking


def rollback_forgets_the_first_pool(patch: Patch) -> None:
    class Forgetful(ExitStack):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def callback(self, *call: object) -> None:  # type: ignore[override]
            self.calls += 1
            if self.calls > 1:
                super().callback(*call)  # type: ignore[arg-type]

    patch.setattr(group, "ExitStack", Forgetful)


def snapshot_is_counted_per_page(patch: Patch) -> None:
    def needed(transfer: PoolTransfer, tier: Tier) -> int:
        run = transfer.slots_on(resolve.OTHER_TIER[tier])
        assert run is not None
        return len(run)

    patch.setattr(resolve, "_needed", needed)


def shortage_evicts_first(patch: Patch) -> None:
    def reserve(self: HostPoolGroup, demand: Mapping[str, int], tier: Tier) -> Reservation | None:
        wanted = self._wanted(demand, tier)
        for _, side, count in wanted:
            if side.available() < count:
                side.evict(count)
        return self._take(wanted, tier)

    patch.setattr(HostPoolGroup, "reserve", reserve)


def taken_slots_go_to_the_first_pages(patch: Patch) -> None:
    def with_taken(self: resolve.Resolution, transfer: PoolTransfer, taken: Mapping[str, Int32Array]) -> PoolTransfer:
        known = transfer.slots_on(resolve.OTHER_TIER[self.tier])
        if transfer.name not in self.demand or known is None:
            return transfer
        spread = np.full(len(known), HOLE, np.int32)
        spread[: len(taken[transfer.name])] = taken[transfer.name]
        return transfer.with_slots(self.tier, spread)

    patch.setattr(resolve.Resolution, "_with_taken", with_taken)


# Layout and copies


def second_draft_lies_over_the_first(patch: Patch) -> None:
    def draft_range(self: PackedLayout, index: int) -> ByteRange:
        start = self.own.slot_bytes
        return ByteRange(start, start + self.drafts[index].slot_bytes)

    patch.setattr(PackedLayout, "draft_range", draft_range)


def draft_lies_over_its_owner(patch: Patch) -> None:
    original = PackedLayout.draft_range

    def draft_range(self: PackedLayout, index: int) -> ByteRange:
        there = original(self, index)
        return ByteRange(there.start - 1, there.stop - 1)

    patch.setattr(PackedLayout, "draft_range", draft_range)


def _plans(patch: Patch, change: Callable[[Layers], Layers]) -> None:
    def planned(made: HostPoolGroup, transfers: Sequence[PoolTransfer]) -> LoadPlan:
        plan = plan_load(made, transfers)
        return replace(plan, layers=change(plan.layers))

    patch.setattr(flight_driver, "plan_load", planned)


def draft_layers_start_at_0_in_each_draft(patch: Patch) -> None:
    patch.setattr(copies, "_by_depth", lambda drafts: [LayerCopy(copy, 0) for copy in drafts])


def draft_depth_is_counted_per_draft(patch: Patch) -> None:
    original = copies._by_depth

    def interleaved(drafts: Sequence[PoolCopy]) -> list[LayerCopy]:
        return sorted(original(drafts), key=lambda each: each.layer)

    patch.setattr(copies, "_by_depth", interleaved)


def draft_deeper_than_the_model_is_dropped(patch: Patch) -> None:
    def change(layers: Layers) -> Layers:
        drafts = [part for part in layers[-1] if part.copy.is_draft]
        return (*layers[:-1], tuple(part for part in layers[-1] if part not in drafts[1:]))

    _plans(patch, change)


def layers_arrive_in_reverse(patch: Patch) -> None:
    _plans(patch, lambda layers: layers[::-1])


def everything_arrives_with_the_last_layer(patch: Patch) -> None:
    _plans(patch, lambda layers: (*((),) * (len(layers) - 1), tuple(part for parts in layers for part in parts)))


def shared_layer_arrives_with_its_last_reader(patch: Patch) -> None:
    def last_uses(entry, layer_count: int) -> tuple[int | None, ...]:
        mapped = [entry.layer_mapper(layer) for layer in range(layer_count)]
        return tuple(own if own not in mapped[layer + 1 :] else None for layer, own in enumerate(mapped))

    patch.setattr(copies, "first_uses", last_uses)


def derived_pool_is_not_loaded(patch: Patch) -> None:
    original = copies._together
    patch.setattr(
        copies,
        "_together",
        lambda made, transfers: [
            each for each in original(made, transfers) if made.get_entry(each.name).derived_from is None
        ],
    )


def staged_pages_are_scattered_in_order(patch: Patch) -> None:
    def backup_staged(self: PoolCopy) -> None:
        staged = self.device_pool.stage(self.device_slots)
        self.pages[np.sort(self.host_slots)] = staged

    patch.setattr(PoolCopy, "backup_staged", backup_staged)


def draft_is_not_backed_up_staged(patch: Patch) -> None:
    original = PoolCopy.backup_staged
    patch.setattr(PoolCopy, "backup_staged", lambda self: None if self.is_draft else original(self))


def capabilities_of_the_first_pool_count(patch: Patch) -> None:
    original = registration.combined_capabilities
    patch.setattr(group, "combined_capabilities", lambda entries: original(list(entries)[:1]))


# Slots


def freed_slot_is_handed_out_twice(patch: Patch) -> None:
    original = SlotAllocator.free

    def free(self: SlotAllocator, slots: Int32Array) -> None:
        original(self, slots)
        self._returned.append(np.array(slots, np.int32))

    patch.setattr(SlotAllocator, "free", free)


def host_pages_are_one_off_in_loads(patch: Patch) -> None:
    original = PoolCopy.load_layer

    def load_layer(self: PoolCopy, layer: int) -> None:
        host = HostSlots((self.host_slots + 1) % len(self.pages))
        original(replace(self, host_slots=host), layer)

    patch.setattr(PoolCopy, "load_layer", load_layer)


BUGS = [
    hole_is_freed,
    hole_is_freed_as_slot_0,
    page_after_a_hole_is_kept,
    one_request_of_a_group_is_kept,
    derived_slots_are_freed,
    shared_slot_is_freed_twice,
    committed_slots_are_freed,
    rollback_forgets_the_first_pool,
    snapshot_is_counted_per_page,
    shortage_evicts_first,
    taken_slots_go_to_the_first_pages,
    second_draft_lies_over_the_first,
    draft_lies_over_its_owner,
    draft_layers_start_at_0_in_each_draft,
    draft_depth_is_counted_per_draft,
    draft_deeper_than_the_model_is_dropped,
    layers_arrive_in_reverse,
    everything_arrives_with_the_last_layer,
    shared_layer_arrives_with_its_last_reader,
    derived_pool_is_not_loaded,
    staged_pages_are_scattered_in_order,
    draft_is_not_backed_up_staged,
    capabilities_of_the_first_pool_count,
    freed_slot_is_handed_out_twice,
    host_pages_are_one_off_in_loads,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    assert is_found()


def test_slots_that_are_freed_in_flight_are_found() -> None:
    assert is_found(patient=False)


def test_without_a_bug_nothing_is_found() -> None:
    assert not any(fails(seed) for seed in range(8))
