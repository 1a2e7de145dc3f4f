"""A pool joins a group, or is refused by name with the group unchanged."""

from dataclasses import replace
from typing import assert_type

import pytest

from hicache.errors import ConfigError
from hicache.layout import PackedLayout
from hicache.pools import HostPool, HostPoolGroup, PoolCapabilities
from tests.pools.helpers import ALL, DRAFT, KV, LAYERS, ODD, entry, group


def test_the_first_entry_is_the_anchor_until_one_is_marked() -> None:
    made = group(entry("kv"), entry("swa"))
    assert made.anchor_entry.name == "kv"
    made.add_entry(entry("state", geometry=ODD, anchor=True))
    assert made.anchor_entry.name == "state"
    assert [each.name for each in made.entries] == ["state", "kv", "swa"]


def test_the_group_shows_the_anchors_sizes_and_layout() -> None:
    made = group(entry("kv", slots=8), entry("state", slots=5, geometry=ODD, anchor=True))
    assert (made.slots, made.available, made.layout.own) == (5, 5, ODD)
    made.alloc(2)
    assert made.available == 3


def test_the_storage_pool_is_the_anchors_physical_pool_also_when_it_is_not_first() -> None:
    anchor = entry("state", geometry=ODD, anchor=True)
    made = group(entry("kv"), anchor)
    assert made.storage_host_pool is anchor.host_pool
    assert made.get_pool() is anchor.host_pool
    assert_type(made.storage_host_pool, HostPool)


def test_capabilities_are_what_all_entries_support_counted_again_on_every_add() -> None:
    made = group(entry("kv"))
    assert made.capabilities.staged_write_back and made.capabilities.zero_copy_storage
    made.add_entry(entry("swa", capabilities=PoolCapabilities(staged_write_back=False, zero_copy_storage=True)))
    assert not made.capabilities.staged_write_back
    assert made.capabilities.zero_copy_storage
    made.add_entry(entry("state", capabilities=PoolCapabilities(staged_write_back=True, zero_copy_storage=False)))
    assert not made.capabilities.zero_copy_storage


def test_a_group_without_pools_supports_nothing() -> None:
    made = group()
    assert not made.capabilities.staged_write_back
    with pytest.raises(ConfigError, match="no pools"):
        _ = made.anchor_entry
    with pytest.raises(ConfigError, match="0 layers"):
        HostPoolGroup(0)


@pytest.mark.parametrize(
    ("capabilities", "named"),
    [
        (PoolCapabilities(), "staged_write_back and zero_copy_storage"),
        (PoolCapabilities(staged_write_back=True), "declare zero_copy_storage"),
        (PoolCapabilities(zero_copy_storage=False), "declare staged_write_back"),
    ],
)
def test_a_pool_that_does_not_declare_a_capability_is_refused_by_name(
    capabilities: PoolCapabilities, named: str
) -> None:
    made = group(entry("kv"))
    with pytest.raises(ConfigError, match=f"'swa'.*{named}"):
        made.add_entry(entry("swa", capabilities=capabilities))
    assert [each.name for each in made.entries] == ["kv"]
    assert made.capabilities.staged_write_back


def test_the_first_slot_seals_the_group_for_good() -> None:
    made = group(entry("kv"))
    assert made.alloc(0) is not None and made.alloc(9) is None and not made.sealed
    taken = made.alloc(1)
    assert taken is not None and made.sealed
    made.free(taken)
    with pytest.raises(ConfigError, match="'swa' comes too late"):
        made.add_entry(entry("swa"))


def test_derived_pools_join_after_their_source() -> None:
    made = group(entry("kv"), entry("indexer", geometry=ODD, derived_from="kv"))
    assert [transfer.name for transfer in made.derived_transfers(["kv"])] == ["indexer"]
    assert made.derived_transfers(["swa"]) == ()


def draftless(name: str) -> HostPool:
    return HostPool.allocate(name, PackedLayout(KV, (DRAFT,)), 8, ALL)


KV_ENTRY = entry("kv")
PACKED = entry("packed", drafts=[DRAFT])
REFUSED = {
    "a name twice": (entry("kv"), "'kv' is registered already"),
    "a host pool twice": (replace(entry("x"), host_pool=KV_ENTRY.host_pool), "'x' and 'kv' have one host pool"),
    "evict without evictable": (replace(entry("x"), host_evict_fn=print), "'x' has only one of host_evict_fn"),
    "evictable without evict": (
        replace(entry("x"), device_evictable_fn=lambda: 0),
        "'x' has only one of device_evict_fn",
    ),
    "half a device side": (replace(entry("x"), device_free_fn=None), "'x' has some of device_alloc_fn"),
    "another geometry on the device": (
        replace(entry("x"), device_pool=entry("y", geometry=ODD).device_pool),
        "'x' has another geometry",
    ),
    "a draft without a place in the page": (
        replace(entry("x"), packed_draft_device_pools=PACKED.packed_draft_device_pools),
        "'x' packs 0 drafts",
    ),
    "a place in the page without a draft": (replace(entry("x"), host_pool=draftless("x")), "'x' packs 1 drafts"),
    "a draft with fewer slots": (
        replace(
            entry("x", drafts=[DRAFT]),
            packed_draft_device_pools=entry("y", drafts=[DRAFT], device_slots=7).packed_draft_device_pools,
        ),
        "'y draft 0' has 7 device slots, its owner 'x' 8",
    ),
    "layers that are never reached": (entry("x", mapper=lambda layer: 0), "mapper of pool 'x' reaches its layers .0."),
    "layers that are not there": (entry("x", mapper=lambda layer: layer + 1), "mapper of pool 'x'"),
    "an unknown source": (entry("x", derived_from="swa"), "'swa', which is not registered"),
    "a derived source": (entry("x", derived_from="indexer"), "'indexer', which is derived itself; name 'kv'"),
    "a derived anchor": (entry("x", derived_from="kv", anchor=True), "'x' is derived, so it can't be the anchor"),
    "a derived pool that evicts": (
        replace(entry("x", derived_from="kv"), host_evict_fn=print, host_evictable_fn=lambda: 0),
        "'x' is derived: it takes and evicts nothing",
    ),
    "a derived pool with fewer host slots": (
        entry("x", derived_from="kv", slots=7),
        "'x' has 7 host slots, its source 'kv' 8",
    ),
    "a derived pool with fewer device slots": (
        entry("x", derived_from="kv", device_slots=7),
        "'x' has 7 device slots, its source 'kv' 8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_work_is_refused_by_name_with_nothing_changed(case: str) -> None:
    wrong, message = REFUSED[case]
    made = group(KV_ENTRY, entry("indexer", derived_from="kv"))
    with pytest.raises(ConfigError, match=message):
        made.add_entry(wrong)
    assert [each.name for each in made.entries] == ["kv", "indexer"]


def test_two_marked_anchors_are_refused() -> None:
    made = group(entry("kv", anchor=True))
    with pytest.raises(ConfigError, match="'kv' and 'swa' are both marked as anchor"):
        made.add_entry(entry("swa", anchor=True))


def test_a_host_pool_in_use_is_refused() -> None:
    used = entry("swa")
    used.host_pool.alloc(1)
    with pytest.raises(ConfigError, match="'swa' has slots in use"):
        group(entry("kv"), used)


def test_a_pool_with_fewer_layers_than_the_model_joins() -> None:
    two = replace(ODD, layers=ODD.layers[:2])
    made = group(entry("kv"), entry("swa", geometry=two, mapper=lambda layer: layer // 2 if layer % 2 == 0 else None))
    assert made.layer_count == LAYERS
