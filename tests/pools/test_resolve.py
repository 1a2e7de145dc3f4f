"""Resolving takes what every listed pool needs or nothing; a derived pool gets its source's slots, freed once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import CacheError, ConfigError, InvariantError
from hicache.pools import HostPoolGroup, PoolTransfer
from hicache.units import HOLE, DeviceSlots, HostSlots, Tier
from tests.pools.helpers import device_slots, entry, fill_cache, group, host_slots, with_reclaim

PRIMARY_DEVICE = device_slots(1, 2)


def free_slots(made: HostPoolGroup) -> dict[str, int]:
    made.check()
    return {each.name: each.host_pool.available for each in made.entries}


def four(*, swa_slots: int = 8) -> HostPoolGroup:
    """The anchor kv with its indexer, and swa with scales of its own."""
    return group(
        entry("kv"),
        entry("indexer", derived_from="kv"),
        entry("swa", slots=swa_slots),
        entry("scales", slots=swa_slots, derived_from="swa"),
    )


def resolve(
    made: HostPoolGroup, *transfers: PoolTransfer, primary_host: HostSlots | None = None
) -> tuple[PoolTransfer, ...] | None:
    return made.resolve_host_transfers(
        transfers, primary_device_indices=PRIMARY_DEVICE, primary_host_indices=primary_host
    )


def hosts(transfer: PoolTransfer) -> list[int]:
    assert transfer.host_slots is not None
    return [int(slot) for slot in transfer.host_slots]


def devices(transfer: PoolTransfer) -> list[int]:
    assert transfer.device_slots is not None
    return [int(slot) for slot in transfer.device_slots]


def test_resolve_and_release_multi_pool_allocation() -> None:
    made = four()
    primary = made.alloc(2)
    assert primary is not None
    given_in = (
        PoolTransfer("scales"),
        PoolTransfer("swa", device_slots(5, 6, 7)),
        PoolTransfer("indexer"),
    )
    resolved = resolve(made, *given_in, primary_host=primary)
    assert resolved is not None
    scales, swa, indexer = resolved
    assert [transfer.name for transfer in resolved] == ["scales", "swa", "indexer"]
    assert (hosts(indexer), devices(indexer)) == (primary.tolist(), [1, 2])
    assert len(hosts(swa)) == 3 and devices(swa) == [5, 6, 7]
    assert (hosts(scales), devices(scales)) == (hosts(swa), [5, 6, 7])
    assert free_slots(made) == {"kv": 6, "indexer": 8, "swa": 5, "scales": 8}
    assert [transfer.host_slots for transfer in given_in] == [None, None, None]
    made.release_transfers(resolved)
    assert free_slots(made) == {"kv": 6, "indexer": 8, "swa": 8, "scales": 8}
    made.free(primary)
    assert free_slots(made)["kv"] == 8


def test_resolve_rolls_back_partial_allocation() -> None:
    made = group(entry("kv"), entry("swa"), entry("state", slots=2))
    given_in = [PoolTransfer("swa", device_slots(1, 2, 3)), PoolTransfer("state", device_slots(1, 2, 3))]
    before = list(given_in)
    assert resolve(made, *given_in) is None
    assert given_in == before and [transfer.host_slots for transfer in given_in] == [None, None]
    assert free_slots(made) == {"kv": 8, "swa": 8, "state": 2}


def test_a_pool_that_refuses_after_the_check_rolls_the_others_back() -> None:
    made = group(entry("kv"), replace(entry("swa"), device_alloc_fn=lambda count: None))
    transfers = [PoolTransfer("kv", None, host_slots(1)), PoolTransfer("swa", None, host_slots(1))]
    found = made.resolve_device_transfers(transfers, primary_device_indices=None, primary_host_indices=None)
    assert found is None
    everything = made.reserve({"kv": 8}, Tier.DEVICE)
    assert everything is not None


def test_a_callback_that_raises_takes_nothing_and_what_was_evicted_stays_evicted() -> None:
    kv, kv_reclaim = with_reclaim(entry("kv"))

    def fail(count: int) -> None:
        raise OSError("the store is gone")

    swa = replace(entry("swa"), host_evict_fn=fail, host_evictable_fn=lambda: 8)
    made = group(kv, swa)
    fill_cache(made, kv_reclaim, "kv", 8)
    made.alloc(8, "swa")
    given_in = (PoolTransfer("kv", device_slots(1, 2, 3)), PoolTransfer("swa", device_slots(1)))
    with pytest.raises(OSError, match="the store is gone"):
        resolve(made, *given_in)
    assert free_slots(made) == {"kv": 3, "swa": 0}
    assert [transfer.host_slots for transfer in given_in] == [None, None]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (PoolTransfer("mamba", device_slots(1)), ConfigError, "'mamba' is not registered"),
        (PoolTransfer("scales"), ConfigError, "'swa', which is neither the anchor .'kv'. nor among"),
        (PoolTransfer("indexer"), ConfigError, "'indexer' lives at the slots of the anchor 'kv', and no host slots"),
        (PoolTransfer("swa"), InvariantError, "'swa' has slots in neither tier"),
        (PoolTransfer("kv", device_slots(1)), InvariantError, "named twice"),
        (PoolTransfer("swa", device_slots(1), host_slots(1, 2)), InvariantError, "'swa' has 1 device and 2 host"),
        (PoolTransfer("swa", device_slots(1, HOLE), host_slots(1, 2)), InvariantError, "'swa' .* hole"),
    ],
)
def test_a_transfer_that_makes_no_sense_is_a_named_error_with_nothing_taken(
    wrong: PoolTransfer, error: type[Exception], message: str
) -> None:
    made = four()
    first = PoolTransfer("kv", device_slots(1, 2)) if wrong.name != "indexer" else PoolTransfer("swa", device_slots(1))
    with pytest.raises(error, match=message):
        resolve(made, first, wrong)
    assert free_slots(made) == {"kv": 8, "indexer": 8, "swa": 8, "scales": 8}
    assert not made.sealed


def test_a_derived_pool_of_the_anchor_follows_the_anchors_own_transfer() -> None:
    made = four()
    resolved = resolve(made, PoolTransfer("indexer"), PoolTransfer("kv", device_slots(4, 5)))
    assert resolved is not None
    assert (hosts(resolved[0]), devices(resolved[0])) == (hosts(resolved[1]), [4, 5])


def test_slots_that_are_there_already_are_kept() -> None:
    made = four()
    mine = made.alloc(2, "swa")
    assert mine is not None
    resolved = resolve(made, PoolTransfer("swa", device_slots(1, 2), mine), PoolTransfer("scales"))
    assert resolved is not None
    assert hosts(resolved[0]) == hosts(resolved[1]) == mine.tolist()
    assert free_slots(made)["swa"] == 6


def test_pages_behind_the_window_stay_holes_and_cost_nothing() -> None:
    made = four()
    resolved = resolve(made, PoolTransfer("swa", device_slots(HOLE, 4, HOLE, 5)), PoolTransfer("scales"))
    assert resolved is not None
    swa, scales = resolved
    assert [slot == HOLE for slot in hosts(swa)] == [True, False, True, False]
    assert hosts(scales) == hosts(swa)
    assert free_slots(made)["swa"] == 6
    made.release_transfers(resolved)
    assert free_slots(made)["swa"] == 8


def test_device_resolution_is_the_same_the_other_way_round() -> None:
    made = four()
    resolved = made.resolve_device_transfers(
        [PoolTransfer("indexer"), PoolTransfer("swa", None, host_slots(3, HOLE, 1)), PoolTransfer("scales")],
        primary_device_indices=PRIMARY_DEVICE,
        primary_host_indices=host_slots(7, 6),
    )
    assert resolved is not None
    indexer, swa, scales = resolved
    assert (devices(indexer), hosts(indexer)) == ([1, 2], [7, 6])
    assert devices(swa)[1] == HOLE and hosts(swa) == [3, HOLE, 1]
    assert (devices(scales), hosts(scales)) == (devices(swa), hosts(swa))
    side = made.get_entry("swa").side(Tier.DEVICE)
    assert side.available() == 6
    made.release_device_transfers(resolved[1:])
    assert side.available() == 8


def test_releasing_what_is_not_held_frees_nothing_in_any_pool() -> None:
    made = four()
    resolved = resolve(made, PoolTransfer("kv", device_slots(1)), PoolTransfer("swa", device_slots(1, 2)))
    assert resolved is not None
    kv, swa = resolved
    for wrong in (PoolTransfer("swa", None, host_slots(7)), PoolTransfer("mamba", None, host_slots(1))):
        with pytest.raises((InvariantError, CacheError)):
            made.release_transfers([kv, wrong])
    assert free_slots(made) == {"kv": 7, "indexer": 8, "swa": 6, "scales": 8}
    made.release_transfers([kv, swa])
    with pytest.raises(InvariantError):
        made.release_transfers([swa])


def test_releasing_unresolved_transfers_frees_nothing() -> None:
    made = four()
    made.release_transfers([PoolTransfer("swa", device_slots(1)), PoolTransfer("indexer")])
    assert free_slots(made)["swa"] == 8


@given(st.data())
def test_many_requests_released_as_one_group_free_each_slot_once(data: st.DataObject) -> None:
    """Requests share a prefix in kv, and lose the head of their window in swa, in any order."""
    made = four()
    shared = made.alloc(2)
    assert shared is not None
    transfers: list[PoolTransfer] = []
    for _ in range(data.draw(st.integers(1, 3))):
        own = resolve(
            made,
            PoolTransfer("kv", device_slots(*range(data.draw(st.integers(0, 2))))),
            PoolTransfer("indexer"),
            PoolTransfer("swa", device_slots(*data.draw(st.lists(st.sampled_from([HOLE, 3]), max_size=2)))),
            PoolTransfer("scales"),
        )
        assert own is not None
        kv = own[0]
        assert kv.host_slots is not None and kv.device_slots is not None
        with_prefix = PoolTransfer("kv", DeviceSlots(kv.device_slots), HostSlots(host_slots(*shared, *kv.host_slots)))
        transfers += [with_prefix, *own[1:]]
    made.release_transfers(data.draw(st.permutations(transfers)))
    assert free_slots(made) == {"kv": 8, "indexer": 8, "swa": 8, "scales": 8}
