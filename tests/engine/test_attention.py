"""Logits and KV have equal bits whatever the chunks, batch, slots and layout; garbage in free memory is never read."""

import numpy as np
import pytest
import torch

from hicache.device.torch import TRASH_SLOT, ZERO_SLOT, TorchDevicePool
from hicache.engine.attention import KV_BLOCK_TOKENS, Segment
from hicache.engine.executor import Executor
from hicache.engine.model import CausalModel
from hicache.units import DeviceSlots
from tests.engine.bench import MODEL
from tests.engine.tiny import PAGE, prompt

GEOMETRY = MODEL.pools[0].geometry
LENGTH = 600


def executor(model: CausalModel, make=TorchDevicePool.page_first) -> Executor:
    return Executor(model, make("kv", GEOMETRY, 400), 1024)


def slots(first: int, pages: int, shuffled: bool = False) -> DeviceSlots:
    run = np.arange(first, first + pages, dtype=np.int32)
    return DeviceSlots(np.random.default_rng(3).permutation(run) if shuffled else run)


def run_in_chunks(runner: Executor, ids: list[int], chunk: int, where: DeviceSlots) -> torch.Tensor:
    for start in range(0, len(ids), chunk):
        logits = runner.run([Segment(np.array(ids[start : start + chunk], np.uint32), start, where)])
    return logits[0]


@pytest.fixture(scope="module")
def whole(model: CausalModel) -> tuple[torch.Tensor, np.ndarray]:
    """Logits and KV of the prompt computed at once."""
    runner = executor(model)
    where = slots(2, LENGTH // PAGE)
    logits = run_in_chunks(runner, prompt(LENGTH), LENGTH, where)
    return logits, runner.pool.stage(where)


@pytest.mark.parametrize("make", [TorchDevicePool.page_first, TorchDevicePool.layer_first])
@pytest.mark.parametrize("chunk", [599, 512, 97, 64, 5])
def test_chunks_layouts_and_scattered_slots_change_no_bit(model, whole, make, chunk):
    runner, where = executor(model, make), slots(2, LENGTH // PAGE, shuffled=True)
    logits = run_in_chunks(runner, prompt(LENGTH), chunk, where)
    assert torch.equal(logits, whole[0])
    assert np.array_equal(runner.pool.stage(where), whole[1])


def test_a_batch_changes_no_bit(model, whole):
    runner, where = executor(model), slots(2, LENGTH // PAGE)
    ids = prompt(LENGTH)
    others = [np.array(prompt(count, seed=count), np.uint32) for count in (1, 3, 70)]
    homes = [slots(100 + 20 * index, 10) for index in range(3)]
    for start, stop in ((0, 400), (400, 598), (598, 599), (599, 600)):
        mine = Segment(np.array(ids[start:stop], np.uint32), start, where)
        batch = [Segment(other, 0, home) for other, home in zip(others, homes, strict=True)]
        logits = runner.run([*batch[:2], mine, batch[2]])
    assert torch.equal(logits[2], whole[0])
    assert np.array_equal(runner.pool.stage(where), whole[1])


def test_more_padding_changes_no_bit(model, whole):
    runner, where = executor(model), slots(2, LENGTH // PAGE)
    ids = np.array(prompt(LENGTH), np.uint32)
    assert torch.equal(runner.run([Segment(ids, 0, where, kv_tokens=3 * KV_BLOCK_TOKENS)])[0], whole[0])


def test_garbage_in_unwritten_memory_is_never_read(model, whole):
    runner, where = executor(model), slots(2, LENGTH // PAGE)
    for layer in range(len(GEOMETRY.layers)):
        for part in (0, 1):
            runner.pool.tensor(layer, part)[2:] = float("nan")
    logits = run_in_chunks(runner, prompt(LENGTH), 77, where)
    assert torch.equal(logits, whole[0])


def test_padding_rows_write_to_the_trash_slot_and_nowhere_else(model):
    runner = executor(model)
    runner.run([Segment(np.array(prompt(5), np.uint32), 0, slots(7, 1))])
    written = [slot for slot in range(400) if runner.pool.stage(slots(slot, 1)).any()]
    assert written == [TRASH_SLOT, 7]
    assert ZERO_SLOT not in written


def test_layers_are_waited_for_in_order_before_each_is_run(model):
    runner = executor(model)
    seen: list[int] = []
    runner.run([Segment(np.array(prompt(5), np.uint32), 0, slots(7, 1))], seen.append)
    assert seen == [0, 1, 2]


def test_logits_of_bfloat16_are_float32(checkpoint):
    from hicache.builder import full_attention
    from hicache.engine.model import load_model

    geometry = full_attention(3, 2, 16, "bfloat16", PAGE).pools[0].geometry
    runner = Executor(load_model(checkpoint, torch.bfloat16), TorchDevicePool.page_first("kv", geometry, 20), 64)
    assert runner.run([Segment(np.array(prompt(9), np.uint32), 0, slots(3, 2))]).dtype == torch.float32
