"""A torch pool moves bytes like any device pool and lets torch compute on the same memory."""

import numpy as np
import pytest
import torch

from hicache.device.torch import TorchDevicePool, torch_dtype
from hicache.layout import ITEM_BYTES, PoolGeometry, TensorSpec
from hicache.units import DeviceSlots, HostSlots

GEOMETRY = PoolGeometry(
    (
        (TensorSpec("k", (2, 4), "bfloat16"), TensorSpec("v", (2, 6), "bfloat16")),
        (TensorSpec("k", (2, 4), "bfloat16"),),
    ),
    tokens_per_slot=3,
)
MAKERS = [TorchDevicePool.page_first, TorchDevicePool.layer_first]


def device(*slots: int) -> DeviceSlots:
    return DeviceSlots(np.array(slots, np.int32))


def host(*slots: int) -> HostSlots:
    return HostSlots(np.array(slots, np.int32))


def filled(maker, slots: int = 5) -> TorchDevicePool:
    pool: TorchDevicePool = maker("kv", GEOMETRY, slots)
    generator = torch.Generator().manual_seed(1)
    for layer, specs in enumerate(GEOMETRY.layers):
        for index in range(len(specs)):
            view = pool.tensor(layer, index)
            view.copy_(torch.randn(view.shape, generator=generator))
    return pool


@pytest.mark.parametrize("maker", MAKERS)
def test_a_new_pool_reads_as_zeros(maker):
    pool = maker("kv", GEOMETRY, 5)
    assert not pool.stage(device(0, 1, 2, 3, 4)).any()
    assert pool.nbytes == 5 * GEOMETRY.slot_bytes


def test_a_host_page_is_the_same_whatever_the_layout():
    staged = [filled(maker).stage(device(3, 0)) for maker in MAKERS]
    assert np.array_equal(staged[0], staged[1])


@pytest.mark.parametrize("source", MAKERS)
@pytest.mark.parametrize("target", MAKERS)
def test_what_was_backed_up_loads_into_other_slots_layer_by_layer(source, target):
    pool = filled(source)
    pages = np.zeros((7, GEOMETRY.slot_bytes + 9), np.uint8)[:, 4:-5]
    pool.backup(device(1, 4, 2), pages, host(6, 0, 3))
    other = target("kv", GEOMETRY, 5)
    other.load_layer(device(2, 0, 3), pages, host(6, 0, 3), 0)
    assert not other.tensor(1, 0).any()
    other.load_layer(device(2, 0, 3), pages, host(6, 0, 3), 1)
    for layer, specs in enumerate(GEOMETRY.layers):
        for index in range(len(specs)):
            assert torch.equal(other.tensor(layer, index)[[2, 0, 3]], pool.tensor(layer, index)[[1, 4, 2]])
            assert not other.tensor(layer, index)[[1, 4]].any()


@pytest.mark.parametrize("maker", MAKERS)
def test_gather_copies_slots_in_the_order_asked(maker):
    pool = filled(maker)
    out = torch.zeros(3, 3, 2, 6, dtype=torch.bfloat16)
    pool.gather(0, 1, torch.tensor([4, 0, 4]), out)
    assert torch.equal(out, pool.tensor(0, 1)[[4, 0, 4]])


@pytest.mark.parametrize("maker", MAKERS)
def test_zero_clears_the_slots_given_and_no_other(maker):
    pool = filled(maker)
    before = pool.stage(device(0, 2, 4))
    pool.zero(device(1, 3))
    assert not pool.stage(device(1, 3)).any()
    assert np.array_equal(pool.stage(device(0, 2, 4)), before)


def test_every_dtype_of_a_geometry_is_one_of_torch():
    assert {name: torch_dtype(name).itemsize for name in ITEM_BYTES} == ITEM_BYTES
