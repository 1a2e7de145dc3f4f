"""What the parts of a step do with each kind of state, against plain formulas and brute force."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.builder import (
    ModelDescription,
    PoolDescription,
    attention_pool,
    chunked_pool,
    indexer_pool,
    latent_pool,
    state_pool,
    window_pool,
)
from hicache.device.torch import TRASH_SLOT, TorchDevicePool
from hicache.engine.attention import Scoring, attend, score_bias
from hicache.engine.routes import Routes
from hicache.engine.segment import Rows, Segment
from hicache.engine.snapshots import boundaries, next_stop
from hicache.engine.states import CONV, RECURRENT, StateStep, copy_state
from hicache.engine.token_pools import Scratch, Sight, TokenPoolStep
from hicache.errors import ConfigError, InvariantError
from hicache.layout import PoolGeometry, TensorSpec
from hicache.units import HOLE, DeviceSlots

PAGE = 4
DIM = 3
SLOTS = 32


# Which tokens a token sees


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


# Recurrent state

WIDTH, CHANNELS = 4, 2
STATE = state_pool([0, 1], (TensorSpec(CONV, (CHANNELS, WIDTH), "float32"), TensorSpec(RECURRENT, (3,), "float32")))


def state_memory() -> TorchDevicePool:
    pool = TorchDevicePool.page_first("state", STATE.geometry, SLOTS)
    for layer in range(2):
        for part in (0, 1):
            pool.tensor(layer, part)[TRASH_SLOT:] = float("nan")
    return pool


def state_segment(tokens: int, source: int | None, to: int | None) -> Segment:
    return Segment(
        np.zeros(tokens, np.uint32),
        0 if source is None else 100,
        {},
        None if source is None else {"state": source},
        None if to is None else {"state": to},
    )


def inputs(first: int, tokens: int, lines: int = 1) -> torch.Tensor:
    """[lines, CHANNELS, tokens], all different."""
    steps = torch.arange(first, first + tokens, dtype=torch.float32)
    channels = torch.arange(CHANNELS)[:, None] * 1000
    return torch.stack([steps + channels + 10_000 * line for line in range(lines)])


def run_conv(pool: TorchDevicePool, first: int, tokens: int, source: int | None, to: int) -> torch.Tensor:
    step = StateStep("state", pool, Rows.flat([state_segment(tokens, source, to)], block=1))
    extended = step.extend_conv(1, inputs(first, tokens))
    step.commit()
    return extended


@pytest.mark.parametrize("tokens", [1, WIDTH - 1, WIDTH, WIDTH + 1, 11])
@pytest.mark.parametrize("more", [1, WIDTH - 1, WIDTH, 9])
def test_a_convolution_keeps_the_last_inputs_however_they_come(tokens: int, more: int):
    pool = state_memory()
    begun = run_conv(pool, 1, tokens, None, 5)
    assert torch.equal(begun[..., -tokens:], inputs(1, tokens))
    assert begun.shape[-1] == max(tokens, WIDTH)
    assert not begun[..., :-tokens].any()
    whole = torch.cat([torch.zeros(1, CHANNELS, WIDTH), inputs(1, tokens + more)], -1)
    assert torch.equal(pool.tensor(1, 0)[5, 0], whole[0, :, tokens : tokens + WIDTH])
    continued = run_conv(pool, 1 + tokens, more, 5, 6)
    assert torch.equal(continued, whole[..., tokens:])
    assert torch.equal(pool.tensor(1, 0)[6, 0], whole[0, :, -WIDTH:])
    assert pool.tensor(0, 0)[6].isnan().all(), "a layer that was not run keeps what it had"


def test_sequences_that_begin_have_no_state():
    step = StateStep("state", state_memory(), Rows.flat([state_segment(3, None, 5)], block=1))
    assert step.begins
    assert step.get(0, CONV) is None
    assert step.get(0, RECURRENT) is None


def test_state_changes_in_its_slot_only_when_the_step_is_kept():
    pool = state_memory()
    pool.tensor(0, 1)[5] = torch.tensor([1.0, 2.0, 3.0])
    step = StateStep("state", pool, Rows.flat([state_segment(1, 5, 5)], block=1))
    state = step.get(0, RECURRENT)
    assert state is not None
    state += 1
    assert torch.equal(step.get(0, RECURRENT)[0], torch.tensor([2.0, 3.0, 4.0]))
    assert torch.equal(pool.tensor(0, 1)[5, 0], torch.tensor([1.0, 2.0, 3.0]))
    step.commit()
    assert torch.equal(pool.tensor(0, 1)[5, 0], torch.tensor([2.0, 3.0, 4.0]))


def test_stacked_sequences_each_keep_their_own_line():
    pool = state_memory()
    pool.tensor(0, 1)[5], pool.tensor(0, 1)[6], pool.tensor(0, 1)[7] = 50.0, 60.0, 70.0
    rows = Rows.stacked([state_segment(1, 5, 8), state_segment(1, 6, None), state_segment(1, 7, 7)])
    step = StateStep("state", pool, rows)
    before = step.get(0, RECURRENT)
    assert before is not None
    assert before[:, 0].tolist() == [50, 60, 70, 0], "a line that only pads reads zeros"
    step.put(0, RECURRENT, before + 1)
    assert pool.tensor(0, 1)[8].isnan().all()
    step.commit()
    assert [float(pool.tensor(0, 1)[slot, 0, 0]) for slot in (5, 6, 7, 8)] == [50, 60, 71, 51]
    step.commit_to(9, 1)
    assert [float(pool.tensor(0, 1)[slot, 0, 0]) for slot in (6, 9)] == [60, 61]
    untouched = [slot for slot in range(2, SLOTS) if slot not in (5, 6, 7, 8, 9)]
    assert pool.tensor(0, 1)[untouched].isnan().all()


def test_a_step_that_is_not_kept_leaves_no_trace():
    pool = state_memory()
    step = StateStep("state", pool, Rows.flat([state_segment(2, None, None)], block=1))
    step.extend_conv(0, inputs(1, 2))
    step.put(0, RECURRENT, torch.ones(1, 3))
    step.commit()
    assert all(pool.tensor(layer, part)[2:].isnan().all() for layer in (0, 1) for part in (0, 1))


def test_a_copy_of_state_is_of_every_layer_and_tensor():
    pool = state_memory()
    for layer in (0, 1):
        for part in (0, 1):
            pool.tensor(layer, part)[5] = 10.0 * layer + part
    copy_state({"state": pool}, {"state": 5}, {"state": 9})
    for layer in (0, 1):
        for part in (0, 1):
            assert (pool.tensor(layer, part)[9] == 10.0 * layer + part).all()
            assert pool.tensor(layer, part)[8].isnan().all()


# Which layer works on which pool


def routes(layers: int, *pools: PoolDescription) -> Routes:
    return Routes.of(ModelDescription(layers, pools))


def test_every_kind_of_pool_has_its_route():
    found = routes(
        6,
        latent_pool([0, 2], 8, 4, "float32", PAGE),
        indexer_pool([2], 4, "float32", PAGE),
        replace(window_pool([1, 3], 10, 2, 4, "float32", PAGE), readers=((5, 1),)),
        replace(STATE, layers=(3, 4)),
    )
    assert found.latents == {0: ("latent", 0), 2: ("latent", 1)}
    assert found.indexers == {2: ("indexer", 0)}
    assert found.attention == {1: ("swa", 0), 3: ("swa", 1), 5: ("swa", 1)}
    assert found.states == {3: ("state", 0), 4: ("state", 1)}
    assert found.sights == {"latent": Sight(), "indexer": Sight(), "swa": Sight(window=10)}
    assert found.sources == {"latent": "latent", "indexer": "latent", "swa": "swa"}
    assert (found.token_pools, found.gathered_pools, found.state_pools) == (("latent", "swa"), ("swa",), ("state",))
    assert found.sees_less


def test_chunks_are_no_windows_and_full_attention_sees_all():
    chunked = routes(2, attention_pool([1], 2, 4, "float32", PAGE), chunked_pool([0], 10, 2, 4, "float32", PAGE))
    assert chunked.sights == {"kv": Sight(), "swa": Sight(chunk=10)}
    assert chunked.sees_less
    assert not routes(1, attention_pool([0], 2, 4, "float32", PAGE), STATE).sees_less


def test_a_pool_the_engine_has_no_use_for_is_refused_by_name():
    tensors = (TensorSpec("colour", (3,), "uint8"), TensorSpec("k", (2,), "float32"))
    unknown = PoolDescription("paint", PoolGeometry.uniform(1, tensors, PAGE), (0,))
    with pytest.raises(ConfigError, match="pool 'paint' holds colour, k per token; the engine has no use for that"):
        routes(1, attention_pool([0], 2, 4, "float32", PAGE), unknown)


# Where snapshots are taken


@given(
    page=st.integers(1, 9),
    start_pages=st.integers(0, 12),
    prompt=st.integers(1, 90),
    interval=st.integers(0, 30),
    shared=st.lists(st.integers(0, 90), max_size=4),
)
def test_snapshots_are_at_page_boundaries_where_reuse_is_likely(
    page: int, start_pages: int, prompt: int, interval: int, shared: list[int]
):
    start = start_pages * page
    expected = []
    grid = next(pages * page for pages in range(1, 32) if pages * page >= interval) if interval else 0
    for position in range(page, prompt, page):
        ends_shared = any(position <= tokens < position + page for tokens in shared)
        is_last = position + page >= prompt
        if position > start and (ends_shared or is_last or (grid and position % grid == 0)):
            expected.append(position)
    assert list(boundaries(page, start, prompt, interval, shared)) == expected


@given(st.lists(st.integers(0, 60)), st.integers(0, 60), st.integers(1, 60))
def test_a_chunk_goes_to_the_next_stop_at_most(stops: list[int], position: int, tokens: int):
    count = 1
    while count < tokens and position + count not in stops:
        count += 1
    assert next_stop(stops, position, tokens) == count


# Attention


def plainly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Row by row and head by head, in float64."""
    _, heads, rows, dim = query.shape
    group = heads // keys.shape[1]
    scale = dim**-0.5 if scoring.scale is None else scoring.scale
    result = torch.zeros(rows, heads, values.shape[-1], dtype=torch.float64)
    for head in range(heads):
        for row in range(rows):
            scores = [float(query[0, head, row].double() @ key.double()) * scale for key in keys[0, head // group]]
            if scoring.softcap:
                scores = [float(np.tanh(score / scoring.softcap)) * scoring.softcap for score in scores]
            weights = np.exp(scores) * visible[row].numpy()
            total = weights.sum() + (0.0 if scoring.sinks is None else float(scoring.sinks[head].double().exp()))
            for weight, value in zip(weights, values[0, head // group], strict=True):
                result[row, head] += weight / total * value.double()
    return result


@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-1.0, 0.5, 2.0, 0.0])])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_is_the_plain_formula(rows: int, softcap: float, sinks: torch.Tensor | None, scale: float | None):
    random = torch.Generator().manual_seed(rows)
    query = torch.randn(1, 4, rows, 8, generator=random) * 2
    keys, values = torch.randn(1, 2, 12, 8, generator=random), torch.randn(1, 2, 12, 5, generator=random)
    at = torch.arange(5, 5 + -(-rows // 4) * 4).clamp(max=11)
    visible = Sight(window=7).visible(at, torch.arange(12))
    scoring = Scoring(scale, softcap, sinks)
    attended = attend(query, keys, values, score_bias(visible, query.dtype), scoring)
    assert torch.allclose(attended.double(), plainly(query, keys, values, visible, scoring), atol=2e-6)
