"""Any geometry survives any pair of device layouts: layers that differ, dtypes mixed, odd sizes, other slots."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.device.array import AnyArray, ArrayDevicePool
from hicache.device.torch import TorchDevicePool, torch_dtype
from hicache.errors import ConfigError
from hicache.layout import DeviceLayout, PoolGeometry, TensorSpec
from hicache.units import ByteArray, DeviceSlots, HostSlots
from tests.pools.device_bytes import LAYOUTS, all_slots, make_pool, write_slot

SLOTS = 4
ROWS = 6
DTYPES = ["bfloat16", "float32", "int8", "uint8", "float8_e4m3fn", "int64"]

head_sizes = st.sampled_from([1, 2, 3, 5, 8])
specs = st.builds(
    TensorSpec, st.sampled_from("kvs"), st.lists(head_sizes, max_size=2).map(tuple), st.sampled_from(DTYPES)
)
geometries = st.builds(
    PoolGeometry,
    st.lists(st.lists(specs, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),
    st.integers(1, 3),
)
layouts = st.sampled_from(sorted(LAYOUTS))
runs = st.tuples(st.permutations(range(SLOTS)), st.permutations(range(SLOTS)), st.permutations(range(ROWS)))

GEMMA = PoolGeometry(
    (
        (TensorSpec("k", (2, 3), "bfloat16"), TensorSpec("v", (2, 3), "bfloat16")),
        (TensorSpec("k", (1, 7), "float32"), TensorSpec("v", (1, 7), "bfloat16"), TensorSpec("scale", (1,), "int8")),
        (TensorSpec("k", (2, 5), "int8"),),
    ),
    3,
)
"""Head sizes, tensors and dtypes that differ by layer."""


def device(slots: Sequence[int]) -> DeviceSlots:
    return DeviceSlots(np.array(slots, np.int32))


def host(slots: Sequence[int]) -> HostSlots:
    return HostSlots(np.array(slots, np.int32))


def fill(pool: ArrayDevicePool, seed: int) -> ByteArray:
    content = np.random.default_rng(seed).integers(0, 256, (pool.slots, pool.geometry.slot_bytes), np.uint8)
    for slot in range(pool.slots):
        write_slot(pool, slot, content[slot])
    return content


@given(geometries, layouts, layouts, runs, st.integers(0, SLOTS), st.booleans())
def test_any_geometry_moves_between_any_layouts(
    geometry: PoolGeometry,
    source: str,
    target: str,
    order: tuple[list[int], list[int], list[int]],
    count: int,
    staged: bool,
) -> None:
    at, to, rows = (slots[:count] for slots in order)
    one = make_pool("kv", geometry, SLOTS, source)
    other = make_pool("kv", geometry, SLOTS, target)
    content, before = fill(one, 1), fill(other, 2)
    pages = np.zeros((ROWS, geometry.slot_bytes + 5), np.uint8)
    own = pages[:, 2:-3]
    if staged:
        own[rows] = one.stage(device(at))
    else:
        one.backup(device(at), own, host(rows))
    assert np.array_equal(own[rows], content[at])
    assert not pages[:, :2].any() and not pages[:, -3:].any()
    for layer in range(len(geometry.layers)):
        other.load_layer(device(to), own, host(rows), layer)
        arrived = geometry.layer_range(layer).stop
        now = all_slots(other)
        assert np.array_equal(now[to][:, :arrived], content[at][:, :arrived])
        assert np.array_equal(now[to][:, arrived:], before[to][:, arrived:])
    others = [slot for slot in range(SLOTS) if slot not in to]
    assert np.array_equal(all_slots(other)[others], before[others])
    assert np.array_equal(all_slots(one), content)


@given(geometries, st.data())
def test_tensors_that_an_engine_has_strided_and_permuted(geometry: PoolGeometry, data: st.DataObject) -> None:
    arrays = [[strided(spec, geometry.tokens_per_slot, data) for spec in layer] for layer in geometry.layers]
    pool = ArrayDevicePool.from_arrays("kv", geometry, SLOTS, arrays)
    dice = np.random.default_rng(3)
    for array in (array for layer in arrays for array in layer):
        array[...] = dice.integers(0, 100, array.shape)
    expected = [b"".join(array[slot].tobytes() for layer in arrays for array in layer) for slot in range(SLOTS)]
    assert [page.tobytes() for page in pool.stage(device(range(SLOTS)))] == expected
    pages = pool.stage(device([3, 1]))
    for layer in range(len(geometry.layers)):
        pool.load_layer(device([0, 2]), pages, host([0, 1]), layer)
    for slot, was in ((0, 3), (1, 1), (2, 1), (3, 3)):
        assert b"".join(array[slot].tobytes() for layer in arrays for array in layer) == expected[was]


def strided(spec: TensorSpec, tokens: int, data: st.DataObject) -> AnyArray:
    """An array [slots, tokens, *shape] whose axes lie in any order in memory, with gaps between the rows of each."""
    shape = (SLOTS, tokens, *spec.shape)
    order = data.draw(st.permutations(range(len(shape))))
    gaps = [data.draw(st.integers(1, 2)) for _ in shape]
    lacking = spec.dtype.startswith(("bfloat", "float8"))
    dtype = f"uint{8 * spec.item_bytes}" if lacking else spec.dtype
    memory = np.zeros([shape[axis] * gap for axis, gap in zip(order, gaps, strict=True)], dtype)
    view = memory[tuple(slice(None, None, gap) for gap in gaps)]
    return view.transpose(np.argsort(order))


@pytest.mark.parametrize("make", [TorchDevicePool.page_first, TorchDevicePool.layer_first])
@given(geometry=geometries, target=layouts)
def test_torch_computes_on_any_geometry(make, geometry: PoolGeometry, target: str) -> None:
    pool: TorchDevicePool = make("kv", geometry, SLOTS)
    assert pool.nbytes == SLOTS * geometry.slot_bytes
    generator = torch.Generator().manual_seed(1)
    for layer, layer_specs in enumerate(geometry.layers):
        for index, spec in enumerate(layer_specs):
            view = pool.tensor(layer, index)
            assert (view.shape, view.dtype) == (
                (SLOTS, geometry.tokens_per_slot, *spec.shape),
                torch_dtype(spec.dtype),
            )
            view.copy_(torch.randint(0, 100, view.shape, generator=generator))
    other = make_pool("kv", geometry, SLOTS, target)
    pages = np.zeros((ROWS, geometry.slot_bytes), np.uint8)
    pool.backup(device([3, 1]), pages, host([0, 5]))
    for layer in range(len(geometry.layers)):
        other.load_layer(device([0, 2]), pages, host([0, 5]), layer)
    for layer, layer_specs in enumerate(geometry.layers):
        for index in range(len(layer_specs)):
            for to, at in ((0, 3), (2, 1)):
                assert other.tensor_bytes(layer, index)[to].tobytes() == raw(pool.tensor(layer, index)[at])


def test_a_layout_that_torch_can_not_view_is_refused_by_name() -> None:
    geometry = PoolGeometry.uniform(1, (TensorSpec("code", (3,), "int8"), TensorSpec("scale", (), "float32")), 1)
    with pytest.raises(ConfigError, match=r"'state': tensor 'scale' of layer 0 starts at byte 3 .* multiples of the 4"):
        TorchDevicePool("state", DeviceLayout.page_first(geometry, 2))
    with pytest.raises(ConfigError, match=r"with strides \(7, 4\)"):
        layers = ((TensorSpec("scale", (), "float32"), TensorSpec("code", (3,), "int8")),)
        TorchDevicePool("state", DeviceLayout.page_first(PoolGeometry(layers, 1), 2))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_head_sizes_that_differ_by_layer_lie_where_they_should(layout: str) -> None:
    pool = make_pool("kv", GEMMA, SLOTS, layout)
    content = fill(pool, 4)
    ends = [GEMMA.layer_range(layer).stop for layer in range(3)]
    assert ends == [72, 72 + 84 + 42 + 3, 72 + 84 + 42 + 3 + 30]
    assert np.array_equal(pool.stage(device(range(SLOTS))), content)
    assert pool.tensor_bytes(1, 0).shape == (SLOTS, 3, 1, 7, 4)
    assert pool.tensor_bytes(2, 0)[1].tobytes() == content[1, ends[1] :].tobytes()


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_no_slots_move_no_bytes(layout: str) -> None:
    pool = make_pool("kv", GEMMA, SLOTS, layout)
    content = fill(pool, 5)
    pages = np.full((ROWS, GEMMA.slot_bytes), 9, np.uint8)
    pool.backup(device([]), pages, host([]))
    pool.load_layer(device([]), pages, host([]), 0)
    assert np.all(pages == 9) and np.array_equal(all_slots(pool), content)
    assert pool.stage(device([])).shape == (0, GEMMA.slot_bytes)
    assert DeviceLayout.page_first(GEMMA, SLOTS).slot_blocks()[0].is_contiguous
