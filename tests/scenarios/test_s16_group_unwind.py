"""S16: a reservation fails half way, on either tier. Nothing stays taken; free + cached + lent = total per pool."""

from dataclasses import replace

import pytest

from hicache.pools import HostPoolGroup, PoolTransfer
from hicache.units import Tier
from tests.pools.helpers import Reclaim, device_slots, entry, fill_cache, group, host_slots, with_reclaim


def locked_state() -> tuple[HostPoolGroup, Reclaim]:
    """kv can be evicted; every slot of `state` is lent out and locked."""
    kv, reclaim = with_reclaim(entry("kv"))
    made = group(kv, entry("state"))
    fill_cache(made, reclaim, "kv", 8)
    made.alloc(8, "state")
    return made, reclaim


def audit(made: HostPoolGroup, *, kv_cached: int, kv_lent: int = 0) -> None:
    made.check()
    assert made.get_pool("kv").available + kv_cached + kv_lent == made.get_pool("kv").slots
    assert len(made.get_pool("state").taken()) == 8


def test_a_backup_with_all_host_slots_of_one_pool_locked_evicts_and_takes_nothing() -> None:
    made, reclaim = locked_state()
    wanted = (PoolTransfer("kv", device_slots(1, 2)), PoolTransfer("state", device_slots(3)))
    assert made.resolve_host_transfers(wanted, primary_device_indices=None, primary_host_indices=None) is None
    assert [transfer.host_slots for transfer in wanted] == [None, None]
    assert reclaim.asked == []
    audit(made, kv_cached=8)


def test_a_load_aborted_after_a_state_slot_was_taken_gives_it_back() -> None:
    made, _ = locked_state()
    side = made.get_entry("state").side(Tier.DEVICE)
    with pytest.raises(KeyboardInterrupt), made.reserve({"kv": 2, "state": 1}, Tier.DEVICE) or pytest.fail():
        assert side.available() == 7
        raise KeyboardInterrupt
    assert side.available() == 8
    audit(made, kv_cached=8)


def test_admission_that_fails_after_a_sidecar_was_taken_gives_everything_back() -> None:
    made = group(entry("kv"), entry("state"), replace(entry("swa"), device_alloc_fn=lambda count: None))
    sides = [made.get_entry(name).side(Tier.DEVICE) for name in ("kv", "state")]
    assert made.reserve({"kv": 3, "state": 1, "swa": 2}, Tier.DEVICE) is None
    assert [side.available() for side in sides] == [8, 8]
    transfers = [PoolTransfer(name, None, host_slots(0)) for name in ("kv", "state", "swa")]
    assert made.resolve_device_transfers(transfers, primary_device_indices=None, primary_host_indices=None) is None
    assert [side.available() for side in sides] == [8, 8]


def test_a_reclaim_that_fails_half_way_leaves_what_it_evicted_free() -> None:
    made, reclaim = locked_state()

    def fail(count: int) -> None:
        reclaim.evict(count)
        raise OSError("write-back failed")

    kv = replace(made.get_entry("kv"), host_evict_fn=fail, host_pool=entry("kv").host_pool)
    other = group(kv, entry("state"))
    reclaim.pool, reclaim.kept = kv.host_pool, []
    fill_cache(other, reclaim, "kv", 8)
    with pytest.raises(OSError, match="write-back failed"):
        other.reserve({"state": 1, "kv": 3}, Tier.HOST)
    other.check()
    assert (other.get_pool("kv").available, other.get_pool("state").available) == (3, 8)
