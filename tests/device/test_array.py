"""A numpy device pool moves exactly the bytes its layout names, whatever the layout on either side."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.device.array import ArrayDevicePool
from hicache.errors import ConfigError
from hicache.layout import DeviceLayout, PoolGeometry, TensorSpec
from hicache.pools import DevicePool
from hicache.units import ByteArray
from tests.pools.helpers import device_slots, host_slots

SLOTS = 5
LAYERS = 2
TOKENS = 4
GEOMETRY = PoolGeometry.uniform(
    LAYERS,
    [TensorSpec("k", (2, 3), "float32"), TensorSpec("v", (3,), "float16"), TensorSpec("mask", (), "uint8")],
    TOKENS,
)
MAKERS = {"layer first": ArrayDevicePool.layer_first, "page first": ArrayDevicePool.page_first}


def filled(pool: ArrayDevicePool) -> ArrayDevicePool:
    random = np.random.default_rng(3)
    for layer, tensor in itertools.product(range(LAYERS), range(3)):
        memory = pool.tensor_bytes(layer, tensor)
        memory[...] = random.integers(0, 256, memory.shape, np.uint8)
    return pool


def by_hand(pool: ArrayDevicePool, slot: int) -> bytes:
    """The host page of a slot, tensor by tensor."""
    return b"".join(
        pool.tensor_bytes(layer, tensor)[slot].tobytes() for layer, tensor in itertools.product(range(LAYERS), range(3))
    )


def wide_pages(rows: int) -> ByteArray:
    """Columns of wider host pages, as an owner with packed drafts has them."""
    return np.zeros((rows, GEOMETRY.slot_bytes + 9), np.uint8)[:, 4:-5]


@pytest.mark.parametrize("maker", MAKERS)
@given(slots=st.permutations(range(SLOTS)), rows=st.permutations(range(7)), count=st.integers(0, SLOTS))
def test_backup_puts_each_slot_on_its_row_and_touches_no_other(
    maker: str, slots: list[int], rows: list[int], count: int
) -> None:
    pool = filled(MAKERS[maker]("kv", GEOMETRY, SLOTS))
    pages = wide_pages(7)
    pool.backup(device_slots(*slots[:count]), pages, host_slots(*rows[:count]))
    for slot, row in zip(slots[:count], rows, strict=False):
        assert pages[row].tobytes() == by_hand(pool, slot)
    assert not pages[rows[count:]].any()


@pytest.mark.parametrize("maker", MAKERS)
def test_stage_gathers_the_same_bytes(maker: str) -> None:
    pool = filled(MAKERS[maker]("kv", GEOMETRY, SLOTS))
    staged = pool.stage(device_slots(4, 0, 1))
    assert staged.flags.c_contiguous
    assert [row.tobytes() for row in staged] == [by_hand(pool, slot) for slot in (4, 0, 1)]


@pytest.mark.parametrize(("writer", "reader"), list(itertools.product(MAKERS, MAKERS)))
def test_a_page_written_from_one_layout_loads_into_another_layer_by_layer(writer: str, reader: str) -> None:
    source = filled(MAKERS[writer]("kv", GEOMETRY, SLOTS))
    target = MAKERS[reader]("kv", GEOMETRY, SLOTS)
    pages = wide_pages(6)
    source.backup(device_slots(3, 1, 2), pages, host_slots(5, 0, 1))
    target.load_layer(device_slots(0, 2, 4), pages, host_slots(5, 0, 1), 1)
    assert not target.tensor_bytes(0, 0).any()
    target.load_layer(device_slots(0, 2, 4), pages, host_slots(5, 0, 1), 0)
    assert [by_hand(target, slot) for slot in (0, 2, 4)] == [by_hand(source, slot) for slot in (3, 1, 2)]
    assert by_hand(target, 1) == by_hand(target, 3) == bytes(GEOMETRY.slot_bytes)


def test_it_is_a_device_pool() -> None:
    pool: DevicePool = ArrayDevicePool.page_first("kv", GEOMETRY, SLOTS)
    assert (pool.name, pool.geometry, pool.slots) == ("kv", GEOMETRY, SLOTS)


def test_an_engine_writes_to_its_own_arrays_and_the_pool_sees_it() -> None:
    geometry = PoolGeometry.uniform(1, [TensorSpec("k", (2,), "float32")], 2)
    k = np.zeros((6, 2), np.float32)
    pool = ArrayDevicePool.from_arrays("kv", geometry, 3, [[k]])
    k[2:4] = [[1, 2], [3, 4]]
    staged = pool.stage(device_slots(1))
    assert staged.view(np.float32).tolist() == [[1, 2, 3, 4]]
    pages = staged + 0
    pool.load_layer(device_slots(0), pages, host_slots(0), 0)
    assert k[:2].tolist() == [[1, 2], [3, 4]]


def test_the_pool_keeps_the_engines_memory_alive() -> None:
    geometry = PoolGeometry.uniform(1, [TensorSpec("k", (2,), "float32")], 2)
    pool = ArrayDevicePool.from_arrays("kv", geometry, 1000, [[np.full((2000, 2), 5, np.float32)]])
    others = [np.zeros((2000, 2), np.float32) for _ in range(4)]
    assert np.all(pool.stage(device_slots(*range(1000))).view(np.float32) == 5)
    assert len(others) == 4


@pytest.mark.parametrize(
    ("dtype", "registered", "fits"),
    [
        ("bfloat16", "uint16", True),
        ("float8_e4m3fn", "uint8", True),
        ("float16", "float16", True),
        ("bfloat16", "float16", False),
        ("float16", "uint16", False),
        ("float32", ">f4", False),
        ("float32", "float64", False),
    ],
)
def test_the_dtype_must_be_the_one_of_the_spec(dtype: str, registered: str, fits: bool) -> None:
    geometry = PoolGeometry.uniform(1, [TensorSpec("k", (2,), dtype)], 2)
    arrays = [[np.zeros((3, 2, 2), registered)]]
    if fits:
        assert ArrayDevicePool.from_arrays("kv", geometry, 3, arrays).slots == 3
        return
    with pytest.raises(ConfigError, match="device pool 'kv': tensor 'k' has dtype"):
        ArrayDevicePool.from_arrays("kv", geometry, 3, arrays)


def test_a_missing_tensor_or_buffer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'kv': give one array for each"):
        ArrayDevicePool.from_arrays("kv", GEOMETRY, 3, [[np.zeros((3, 4, 2, 3), np.float32)]])
    layout = DeviceLayout.page_first(GEOMETRY, 2)
    with pytest.raises(ConfigError, match="'kv': buffers of"):
        ArrayDevicePool("kv", layout, [np.zeros(3, np.uint8)])
