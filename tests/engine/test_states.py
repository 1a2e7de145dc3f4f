"""Recurrent state is read from slots, and kept in them only when a step is."""

import numpy as np
import pytest
import torch

from hicache.builder import (
    state_pool,
)
from hicache.device.torch import TRASH_SLOT, TorchDevicePool
from hicache.engine.rows import Rows
from hicache.engine.segment import Segment
from hicache.engine.states import CONV, RECURRENT, StateStep, copy_state
from hicache.layout import TensorSpec

SLOTS = 32


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
