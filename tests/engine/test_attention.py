"""Logits and KV have equal bits whatever the chunks, batch, slots and layout; garbage in free memory is never read."""

import numpy as np
import pytest
import torch

from hicache.device.torch import TRASH_SLOT, ZERO_SLOT, TorchDevicePool
from hicache.engine.executor import Executor
from hicache.engine.model import CausalModel
from hicache.engine.segment import Segment
from hicache.engine.token_pools import KV_BLOCK_TOKENS
from hicache.units import DeviceSlots
from tests.engine.bench import MODEL
from tests.engine.tiny import PAGE, prompt

GEOMETRY = MODEL.pools[0].geometry
LENGTH = 600


def executor(model: CausalModel, make=TorchDevicePool.page_first) -> Executor:
    return Executor(model, MODEL, {"kv": make("kv", GEOMETRY, 400)}, 1024)


def segment(ids: list[int], start: int, where: DeviceSlots, **more) -> Segment:
    return Segment(np.array(ids, np.uint32), start, {"kv": where}, **more)


def logits_of(runner: Executor, segments: list[Segment], before_layer=lambda layer: None) -> list[torch.Tensor]:
    return [output.logits[-1] for output in runner.run(segments, before_layer)]


def slots(first: int, pages: int, shuffled: bool = False) -> DeviceSlots:
    run = np.arange(first, first + pages, dtype=np.int32)
    return DeviceSlots(np.random.default_rng(3).permutation(run) if shuffled else run)


def run_in_chunks(runner: Executor, ids: list[int], chunk: int, where: DeviceSlots) -> torch.Tensor:
    for start in range(0, len(ids), chunk):
        logits = logits_of(runner, [segment(ids[start : start + chunk], start, where)])
    return logits[0]


@pytest.fixture(scope="module")
def whole(model: CausalModel) -> tuple[torch.Tensor, np.ndarray]:
    """Logits and KV of the prompt computed at once."""
    runner = executor(model)
    where = slots(2, LENGTH // PAGE)
    logits = run_in_chunks(runner, prompt(LENGTH), LENGTH, where)
    return logits, runner.pools["kv"].stage(where)


@pytest.mark.parametrize("make", [TorchDevicePool.page_first, TorchDevicePool.layer_first])
@pytest.mark.parametrize("chunk", [599, 512, 97, 64, 5])
def test_chunks_layouts_and_scattered_slots_change_no_bit(model, whole, make, chunk):
    runner, where = executor(model, make), slots(2, LENGTH // PAGE, shuffled=True)
    logits = run_in_chunks(runner, prompt(LENGTH), chunk, where)
    assert torch.equal(logits, whole[0])
    assert np.array_equal(runner.pools["kv"].stage(where), whole[1])


def test_a_batch_changes_no_bit(model, whole):
    runner, where = executor(model), slots(2, LENGTH // PAGE)
    ids = prompt(LENGTH)
    others = [prompt(count, seed=count) for count in (1, 3, 70)]
    homes = [slots(100 + 20 * index, 10) for index in range(3)]
    for start, stop in ((0, 400), (400, 598), (598, 599), (599, 600)):
        mine = segment(ids[start:stop], start, where)
        batch = [segment(other, 0, home) for other, home in zip(others, homes, strict=True)]
        logits = logits_of(runner, [*batch[:2], mine, batch[2]])
    assert torch.equal(logits[2], whole[0])
    assert np.array_equal(runner.pools["kv"].stage(where), whole[1])


def test_more_padding_changes_no_bit(model, whole):
    runner, where = executor(model), slots(2, LENGTH // PAGE)
    padded = segment(prompt(LENGTH), 0, where, kv_tokens=3 * KV_BLOCK_TOKENS)
    assert torch.equal(logits_of(runner, [padded])[0], whole[0])


def test_garbage_in_unwritten_memory_is_never_read(model, whole):
    runner, where = executor(model), slots(2, LENGTH // PAGE)
    for layer in range(len(GEOMETRY.layers)):
        for part in (0, 1):
            runner.pools["kv"].tensor(layer, part)[2:] = float("nan")
    logits = run_in_chunks(runner, prompt(LENGTH), 77, where)
    assert torch.equal(logits, whole[0])


def test_padding_rows_write_to_the_trash_slot_and_nowhere_else(model):
    runner = executor(model)
    runner.run([segment(prompt(5), 0, slots(7, 1))])
    written = [slot for slot in range(400) if runner.pools["kv"].stage(slots(slot, 1)).any()]
    assert written == [TRASH_SLOT, 7]
    assert ZERO_SLOT not in written


def test_layers_are_waited_for_in_order_before_each_is_run(model):
    runner = executor(model)
    seen: list[int] = []
    logits_of(runner, [segment(prompt(5), 0, slots(7, 1))], seen.append)
    assert seen == [0, 1, 2]


def test_logits_of_bfloat16_are_float32(checkpoint):
    from hicache.builder import full_attention
    from hicache.engine.model import load_model

    half = full_attention(3, 2, 16, "bfloat16", PAGE)
    pools = {"kv": TorchDevicePool.page_first("kv", half.pools[0].geometry, 20)}
    runner = Executor(load_model(checkpoint, torch.bfloat16), half, pools, 64)
    assert logits_of(runner, [segment(prompt(9), 0, slots(3, 2))])[0].dtype == torch.float32
