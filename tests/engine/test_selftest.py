"""The self-test passes where bits are equal, fails where they are not, and leaves no trace."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hicache.builder import ModelDescription, PoolDescription
from hicache.device.torch import TorchDevicePool
from hicache.engine.executor import Executor
from hicache.engine.selftest import is_exact
from hicache.layout import PoolGeometry
from hicache.units import DeviceSlots
from tests.engine.bench import MODEL
from tests.engine.tiny import LAYERS, VOCABULARY

GEOMETRY = MODEL.pools[0].geometry


class Drifting(Executor):
    """The last bit depends on how many parts a step has."""

    def run(self, segments, before_layer=lambda layer: None):
        outputs = super().run(segments, before_layer)
        return [
            replace(output, logits=torch.nextafter(output.logits, output.logits + len(segments) - 1))
            for output in outputs
        ]


class DriftingKeys(Executor):
    """The last bit of what is kept depends on how many tokens a step has."""

    def run(self, segments, before_layer=lambda layer: None):
        outputs = super().run(segments, before_layer)
        if len(segments[0].token_ids) == 1:
            self.pools["kv"].tensor(0, 0)[int(segments[0].slots["kv"][-1]), -1] += 1e-3
        return outputs


def executor(model, kind: type[Executor] = Executor, geometry: PoolGeometry = GEOMETRY, slots: int = 40) -> Executor:
    description = ModelDescription(LAYERS, (PoolDescription("kv", geometry, tuple(range(LAYERS))),))
    return kind(model, description, {"kv": TorchDevicePool.page_first("kv", geometry, slots)}, 256)


def test_it_passes_here_and_leaves_the_pool_zeroed(model):
    runner = executor(model)
    assert is_exact(runner, VOCABULARY)
    assert not runner.pools["kv"].stage(DeviceSlots(np.arange(2, 40, dtype=np.int32))).any()


@pytest.mark.parametrize("kind", [Drifting, DriftingKeys])
def test_it_fails_where_bits_differ(model, kind):
    runner = executor(model, kind)
    assert not is_exact(runner, VOCABULARY)
    assert not runner.pools["kv"].stage(DeviceSlots(np.arange(2, 40, dtype=np.int32))).any()


@pytest.mark.parametrize("slots", [4, 5, 9])
def test_a_small_pool_is_enough(model, slots):
    assert is_exact(executor(model, slots=slots), VOCABULARY)


def test_a_pool_of_one_page_is_taken_for_inexact(model):
    assert not is_exact(executor(model, slots=3), VOCABULARY)


def test_a_long_page_is_enough(model):
    geometry = PoolGeometry(GEOMETRY.layers, tokens_per_slot=640)
    assert is_exact(executor(model, geometry=geometry, slots=6), VOCABULARY)
