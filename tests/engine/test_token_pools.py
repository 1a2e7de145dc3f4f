"""Rows go to their slots; what a segment sees comes back in order, by the window or chunk that it has, and no more."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.device.torch import TRASH_SLOT, TorchDevicePool
from hicache.engine.rows import Rows
from hicache.engine.segment import Segment
from hicache.engine.token_pools import Scratch, Sight, TokenPoolStep
from hicache.errors import InvariantError
from hicache.layout import PoolGeometry, TensorSpec
from hicache.units import HOLE, DeviceSlots

PAGE = 4
DIM = 3
SLOTS = 32


def sees(row: int, key: int, window: int | None, chunk: int | None) -> bool:
    """Token by token, as one would say it."""
    if key > row:
        return False
    if chunk is not None:
        return key // chunk == row // chunk
    return window is None or row - key < window


SIGHTS = st.one_of(
    st.just(Sight()),
    st.builds(lambda tokens: Sight(window=tokens), st.integers(1, 20)),
    st.builds(lambda tokens: Sight(chunk=tokens), st.integers(1, 20)),
)


@given(SIGHTS, st.integers(0, 40), st.integers(1, 20), st.integers(0, 30))
def test_sight_is_what_one_would_say_token_by_token(sight: Sight, first_row: int, rows: int, first_key: int):
    at, keys = torch.arange(first_row, first_row + rows), torch.arange(first_key, first_key + 30)
    expected = [[sees(int(row), int(key), sight.window, sight.chunk) for key in keys] for row in at]
    assert sight.visible(at, keys).tolist() == expected


@given(SIGHTS, st.integers(0, 60))
def test_the_first_token_seen(sight: Sight, position: int):
    seen = [key for key in range(position + 1) if sees(position, key, sight.window, sight.chunk)]
    assert sight.first(position) == seen[0]


# Token pools

GEOMETRY = PoolGeometry.uniform(2, (TensorSpec("k", (DIM,), "float32"),), PAGE)


EVERYTHING = Sight()


def token_pool() -> TorchDevicePool:
    """Every value is not a number until it is written."""
    pool = TorchDevicePool.page_first("kv", GEOMETRY, SLOTS)
    for layer in range(2):
        pool.tensor(layer, 0)[TRASH_SLOT:] = float("nan")
    return pool


def segment(start: int, tokens: int, slots: list[int], **more) -> Segment:
    return Segment(np.zeros(tokens, np.uint32), start, {"kv": DeviceSlots(np.array(slots, np.int32))}, **more)


def values(first: int, tokens: int) -> torch.Tensor:
    """Those of the token at position p are p, p + 0.1, p + 0.2."""
    return torch.arange(first, first + tokens)[:, None] + torch.arange(DIM)[None] / 10


def padded_values(rows: Rows) -> torch.Tensor:
    """What a layer gives for all rows: by position, and -1 where rows only pad."""
    made = torch.cat([values(one.start, len(one.token_ids)) for one in rows.segments])
    return torch.cat([made, torch.full((rows.count - rows.used, DIM), -1.0)])


def write(pool: TorchDevicePool, rows: Rows, sight: Sight = EVERYTHING) -> TokenPoolStep:
    step = TokenPoolStep(pool, "kv", sight, rows, block=PAGE)
    step.write(1, 0, padded_values(rows))
    return step


def test_rows_go_to_their_slots_and_nowhere_else():
    pool = token_pool()
    write(pool, Rows.flat([segment(0, 6, [9, 4]), segment(0, 3, [7])]))
    there = pool.tensor(1, 0)
    assert torch.equal(there[9], values(0, 4))
    assert torch.equal(there[4, :2], values(4, 2))
    assert torch.equal(there[7, :3], values(0, 3))
    assert (there[TRASH_SLOT, 0] == -1).all()
    untouched = [slot for slot in range(2, SLOTS) if slot not in (9, 4, 7)]
    assert there[untouched].isnan().all()
    assert there[4, 2:].isnan().all()
    assert there[7, 3:].isnan().all()
    assert pool.tensor(0, 0)[2:].isnan().all()


def test_runs_of_slots_are_written_as_one_and_cut_where_they_break():
    pool = token_pool()
    write(pool, Rows.flat([segment(2, 21, [5, 6, 7, 8, 12, 11])]))
    there = pool.tensor(1, 0)
    for page, slot in enumerate([5, 6, 7, 8, 12, 11]):
        first, stop = max(2, page * PAGE), min(23, (page + 1) * PAGE)
        assert torch.equal(there[slot, first % PAGE : first % PAGE + stop - first], values(first, stop - first))


@pytest.mark.parametrize("sight", [Sight(), Sight(window=6), Sight(chunk=10)])
def test_what_is_gathered_is_in_order_and_zero_behind(sight: Sight):
    pool, slots = token_pool(), [8, 3, 15, 4]
    write(pool, Rows.flat([segment(0, 9, slots)]))
    step = write(pool, Rows.flat([segment(9, 4, slots)]), sight)
    (read,) = step.reads
    gathered = step.gather(1, 0, read, Scratch([GEOMETRY], 64))
    count = read.stop - read.base
    assert (read.base, read.stop, read.kv_tokens % PAGE) == (sight.first(9) // PAGE * PAGE, 13, 0)
    assert torch.equal(gathered[:count], values(read.base, count))
    assert not gathered[count:].any()
    keys = range(read.base, read.base + read.kv_tokens)
    expected = [[sees(row, key, sight.window, sight.chunk) for key in keys] for row in range(9, 13)]
    assert read.visible[:4].tolist() == expected


@pytest.mark.parametrize("sight", [Sight(window=6), Sight(chunk=8)])
def test_pages_behind_the_window_need_no_slots(sight: Sight):
    """With a block of several pages, gathering begins before the first page that is seen."""
    pool, slots = token_pool(), [8, 3, 15, 4, 6]
    write(pool, Rows.flat([segment(0, 16, slots)]))
    without = [HOLE, HOLE, *slots[2:]]
    step = TokenPoolStep(pool, "kv", sight, Rows.flat([segment(16, 1, without)]), block=4 * PAGE)
    near = TokenPoolStep(pool, "kv", sight, Rows.flat([segment(13, 1, without)]), block=4 * PAGE)
    (read,) = near.reads
    gathered = near.gather(1, 0, read, Scratch([GEOMETRY], 64))
    first = sight.first(13) // PAGE * PAGE
    assert read.base == 0
    assert not gathered[:first].any()
    assert torch.equal(gathered[first:14], values(first, 14 - first))
    assert not read.visible[:, : sight.first(13)].any()
    assert step.reads[0].stop == 17


@pytest.mark.parametrize(
    ("sight", "start", "lacking"),
    [(Sight(), 12, 0), (Sight(window=6), 12, 1), (Sight(window=6), 12, 2), (Sight(chunk=8), 12, 2)],
)
def test_a_page_that_is_seen_and_has_no_slot_is_a_bug(sight: Sight, start: int, lacking: int):
    slots = [8, 3, 15, 4]
    slots[lacking] = HOLE
    with pytest.raises(InvariantError, match="not all have slots"):
        TokenPoolStep(token_pool(), "kv", sight, Rows.flat([segment(start, 1, slots)]), block=PAGE)


def test_a_token_without_a_slot_to_go_to_is_a_bug():
    with pytest.raises(InvariantError, match="position 4 has no slot"):
        TokenPoolStep(token_pool(), "kv", Sight(window=2), Rows.flat([segment(3, 2, [5, HOLE])]), block=PAGE)


def test_flat_rows_lie_in_one_line_and_see_their_own_alone():
    pool = token_pool()
    write(pool, Rows.flat([segment(0, 5, [9, 4])]))
    step = write(pool, Rows.flat([segment(5, 2, [9, 4]), segment(0, 3, [7])]))
    assert step.places() == [(0, 0), (0, 8)]
    (joined,) = step.gather_all(1, 0)
    assert torch.equal(joined[:7], values(0, 7))
    assert torch.equal(joined[8:11], values(0, 3))
    assert not joined[[7, 11]].any()
    mask = step.joint_mask()
    assert mask.shape == (1, 1, 8, 12)
    seen = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6], [8], [8, 9], [8, 9, 10], [], [], []]
    assert [row.nonzero()[:, 0].tolist() for row in mask[0, 0]] == seen


def test_stacked_rows_have_a_line_each():
    pool = token_pool()
    write(pool, Rows.flat([segment(0, 5, [9, 4]), segment(0, 2, [7])]))
    step = write(pool, Rows.stacked([segment(5, 1, [9, 4]), segment(2, 1, [7])]))
    assert step.places() == [(0, 0), (1, 0)]
    joined, mask = step.gather_all(1, 0), step.joint_mask()
    assert joined.shape == (4, 8, DIM)
    assert torch.equal(joined[0, :6], values(0, 6))
    assert torch.equal(joined[1, :3], values(0, 3))
    assert not joined[1, 3:].any()
    assert not joined[2:].any()
    assert mask.shape == (4, 1, 1, 8)
    assert [line[0, 0].nonzero()[:, 0].tolist() for line in mask] == [[0, 1, 2, 3, 4, 5], [0, 1, 2], [], []]
