"""What is backed up comes back byte for byte in every pool, drafts included, staged or plain, layer by layer."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hicache.device.array import ArrayDevicePool
from hicache.errors import InvariantError
from hicache.pools import HostPoolGroup, PoolCapabilities, PoolTransfer, plan_backup, plan_load
from hicache.units import HOLE, ByteArray, DeviceSlots, HostSlots
from tests.pools.helpers import ALL, DRAFT, KV, LAYERS, ODD, device_slots, entry, group, host_slots

PLAIN = PoolCapabilities(staged_write_back=False, zero_copy_storage=True)


class CountingPool(ArrayDevicePool):
    """Counts how it was asked for its bytes."""

    staged = 0
    backed_up = 0

    def stage(self, slots: DeviceSlots) -> ByteArray:
        self.staged += 1
        return super().stage(slots)

    def backup(self, slots: DeviceSlots, pages: ByteArray, rows: HostSlots) -> None:
        self.backed_up += 1
        super().backup(slots, pages, rows)


def filled(made: HostPoolGroup) -> HostPoolGroup:
    """Random bytes in every device pool."""
    random = np.random.default_rng(7)
    for each in made.entries:
        for pool in (each.device_pool, *each.packed_draft_device_pools):
            assert isinstance(pool, ArrayDevicePool)
            for layer, specs in enumerate(pool.geometry.layers):
                for tensor in range(len(specs)):
                    memory = pool.tensor_bytes(layer, tensor)
                    memory[...] = random.integers(0, 256, memory.shape, np.uint8)
    return made


def whole() -> HostPoolGroup:
    return filled(
        group(entry("kv", drafts=[DRAFT, DRAFT]), entry("indexer", geometry=ODD, derived_from="kv"), entry("swa"))
    )


def transfers(device: Sequence[int], host: Sequence[int]) -> list[PoolTransfer]:
    return [PoolTransfer(name, device_slots(*device), host_slots(*host)) for name in ("kv", "indexer", "swa")]


def device_bytes(made: HostPoolGroup, slots: Sequence[int]) -> list[bytes]:
    pools = [pool for each in made.entries for pool in (each.device_pool, *each.packed_draft_device_pools)]
    return [pool.stage(device_slots(*slots)).tobytes() for pool in pools]


def test_every_pool_and_draft_comes_back_into_other_slots() -> None:
    made = whole()
    expected = device_bytes(made, [1, 5, 2])
    plan_backup(made, transfers([1, 5, 2], [7, 0, 3])).run()
    load = plan_load(made, transfers([6, 3, 0], [7, 0, 3]))
    for layer in range(LAYERS):
        load.run_layer(layer)
    assert device_bytes(made, [6, 3, 0]) == expected
    assert load.nbytes == 3 * sum(each.host_pool.layout.page_bytes for each in made.entries)


def test_a_host_page_is_the_owners_block_then_the_drafts() -> None:
    made = whole()
    plan_backup(made, transfers([4], [2])).run()
    kv = made.get_entry("kv")
    blocks = [pool.stage(device_slots(4))[0] for pool in (kv.device_pool, *kv.packed_draft_device_pools)]
    assert np.array_equal(kv.host_pool.pages[2], np.concatenate(blocks))


def test_drafts_take_no_host_slots_and_are_marked() -> None:
    made = whole()
    copies = plan_backup(made, transfers([1], [0])).copies
    assert [(copy.pool, copy.is_draft) for copy in copies] == [
        ("kv", False),
        ("kv", True),
        ("kv", True),
        ("indexer", False),
        ("swa", False),
    ]
    assert [each.name for each in made.entries] == ["kv", "indexer", "swa"]


def test_draft_depth_d_arrives_with_target_layer_min_of_d_and_last() -> None:
    made = whole()
    drafts = list(made.get_entry("kv").packed_draft_device_pools)
    layers = plan_load(made, transfers([1], [0])).layers
    arrivals = [
        (layer, drafts.index(part.copy.device_pool), part.layer)
        for layer, parts in enumerate(layers)
        for part in parts
        if part.copy.is_draft and isinstance(part.copy.device_pool, ArrayDevicePool)
    ]
    assert arrivals == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (2, 1, 1)]


def test_a_layer_brings_every_pools_part_of_it_and_nothing_of_a_later_one() -> None:
    sparse = replace(ODD, layers=ODD.layers[:2])
    made = filled(group(entry("kv"), entry("swa", geometry=sparse, mapper=lambda layer: {0: 1, 2: 0}.get(layer))))
    pairs = [PoolTransfer(name, device_slots(1), host_slots(0)) for name in ("kv", "swa")]
    load = plan_load(made, pairs)
    assert [[(part.copy.pool, part.layer) for part in parts] for parts in load.layers] == [
        [("kv", 0), ("swa", 1)],
        [("kv", 1)],
        [("kv", 2), ("swa", 0)],
    ]
    plan_backup(made, pairs).run()
    before = made.get_entry("kv").device_pool.stage(device_slots(3))[0]
    moved = [replace(pair, device_slots=device_slots(3)) for pair in pairs]
    plan_load(made, moved).run_layer(1)
    after = made.get_entry("kv").device_pool.stage(device_slots(3))[0]
    part = KV.layer_range(1)
    changed = np.flatnonzero(before != after)
    assert part.start <= changed.min() and changed.max() < part.stop
    assert np.array_equal(after[part.start : part.stop], made.get_pool("kv").pages[0, part.start : part.stop])


def test_a_pool_layer_that_several_model_layers_share_arrives_with_the_first() -> None:
    one = replace(ODD, layers=ODD.layers[:1])
    made = group(entry("kv"), entry("shared", geometry=one, mapper=lambda layer: 0 if layer else None))
    load = plan_load(made, [PoolTransfer("shared", device_slots(1), host_slots(0))])
    assert [len(parts) for parts in load.layers] == [0, 1, 0]


def test_staged_write_back_is_chosen_while_all_declare_it_and_bytes_are_equal_both_ways() -> None:
    pool = CountingPool.page_first("kv", KV, 8)
    made = group(replace(entry("kv"), device_pool=pool))
    filled(made)
    pair = PoolTransfer("kv", device_slots(3, 1, 2), host_slots(0, 1, 5))
    plan = plan_backup(made, [pair])
    assert plan.staged
    plan.run()
    assert pool.staged == 1
    staged = made.get_pool("kv").pages.copy()
    made.get_pool("kv").pages[...] = 0

    made.add_entry(entry("swa", capabilities=PLAIN))
    plan = plan_backup(made, [pair])
    assert not plan.staged
    plan.run()
    assert pool.staged == 1
    assert np.array_equal(made.get_pool("kv").pages, staged)


def test_holes_are_not_copied() -> None:
    made = filled(group(entry("kv")))
    pages = made.get_pool("kv").pages
    plan = plan_backup(made, [PoolTransfer("kv", device_slots(HOLE, 3), host_slots(HOLE, 1))])
    plan.run()
    assert plan.nbytes == KV.slot_bytes
    assert pages[1].any() and not pages[[0, 2, 3, 4, 5, 6, 7]].any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([PoolTransfer("kv", device_slots(1))], "'kv' is not resolved"),
        ([PoolTransfer("kv", device_slots(1), host_slots(1))], "leave out .'indexer'."),
    ],
)
def test_a_transfer_that_would_leave_something_behind_is_a_bug(given: list[PoolTransfer], message: str) -> None:
    made = group(entry("kv"), entry("indexer", derived_from="kv"))
    complete = given if "leave" in message else [*given, PoolTransfer("indexer", device_slots(1), host_slots(1))]
    for plan in (plan_backup, plan_load):
        with pytest.raises(InvariantError, match=message):
            plan(made, complete)


def test_capabilities_without_staging_are_declared_too() -> None:
    assert not group(entry("kv", capabilities=PLAIN)).capabilities.staged_write_back
    assert group(entry("kv", capabilities=ALL)).capabilities.staged_write_back
