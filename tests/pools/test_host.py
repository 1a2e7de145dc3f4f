"""A host pool has one row of bytes per slot, and gives its memory back once."""

import pytest

from hicache.errors import ClosedError, ConfigError
from hicache.layout import PackedLayout
from hicache.memory import HostArena
from hicache.pools import HostPool
from tests.pools.helpers import ALL, DRAFT, KV, ODD


def test_pages_are_one_row_per_slot_packed_drafts_included() -> None:
    pool = HostPool.allocate("kv", PackedLayout(KV, (DRAFT, ODD)), 5, ALL)
    assert pool.pages.shape == (5, KV.slot_bytes + DRAFT.slot_bytes + ODD.slot_bytes)
    pool.pages[3] = 7
    assert pool.pages[3].min() == 7
    assert pool.pages[2].max() == pool.pages[4].max() == 0


def test_slots_come_and_go() -> None:
    pool = HostPool.allocate("kv", PackedLayout(KV), 3, ALL)
    taken = pool.alloc(2)
    assert taken is not None
    assert (pool.available, pool.taken().tolist()) == (1, [0, 1])
    assert pool.alloc(2) is None
    pool.free(taken)
    pool.check()
    assert pool.available == 3


def test_a_closed_pool_has_no_pages() -> None:
    pool = HostPool.allocate("kv", PackedLayout(KV), 3, ALL)
    pool.close()
    with pytest.raises(ClosedError):
        _ = pool.pages


def test_a_pool_without_room_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'kv' has 0 slots"):
        HostPool.allocate("kv", PackedLayout(KV), 0, ALL)
    arena = HostArena.allocate(KV.slot_bytes)
    with pytest.raises(ConfigError, match=r"'kv': 2 pages .* don't fit"):
        HostPool("kv", PackedLayout(KV), 2, arena, ALL)
