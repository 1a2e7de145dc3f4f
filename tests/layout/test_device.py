"""Device layouts against brute force: every byte a layout names is named once, and stands for the right host byte."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.layout import Block, DeviceLayout, PoolGeometry, TensorPlace, TensorSpec
from hicache.units import ByteRange
from tests.layout.test_geometry import geometries
from tests.pools.device_bytes import LAYOUTS

GEOMETRY = PoolGeometry.uniform(2, [TensorSpec("k", (2, 3), "float32"), TensorSpec("v", (2,), "float16")], 4)
SLOTS = 3
Byte = tuple[int, int]


Places = tuple[tuple[TensorPlace, ...], ...]


def element_bytes(geometry: PoolGeometry, all_places: Places, slot: int) -> list[Byte]:
    """(buffer, device byte) for each host byte of a slot, straight from the places."""
    found: list[Byte] = []
    for specs, places in zip(geometry.layers, all_places, strict=True):
        for spec, place in zip(specs, places, strict=True):
            for index in product(*map(range, (geometry.tokens_per_slot, *spec.shape))):
                steps = zip((slot, *index), place.strides_bytes, strict=True)
                start = place.offset_bytes + sum(i * stride for i, stride in steps)
                found += [(place.buffer, start + byte) for byte in range(spec.item_bytes)]
    return found


def block_bytes(blocks: Sequence[Block], slot: int) -> list[Byte]:
    """The same from blocks."""
    found: list[Byte] = []
    for block in blocks:
        for index in product(*map(range, block.dims)):
            inner = sum(i * stride for i, stride in zip(index, block.strides_bytes, strict=True))
            found.append((block.buffer, block.offset_bytes + slot * block.slot_stride_bytes + inner))
    return found


def of_parent(parent_shape: tuple[int, ...], index_k, index_v, permute=None) -> DeviceLayout:
    """A layout of one layer whose two tensors are views of one parent."""
    parent = np.zeros(parent_shape, np.float32)
    views = [parent[index_k], parent[index_v]]
    if permute is not None:
        views = [view.transpose(permute) for view in views]
    shape = views[0].shape
    specs = tuple(TensorSpec(name, shape[2:], "float32") for name in "kv")
    base = parent.ctypes.data
    places = tuple(TensorPlace(0, view.ctypes.data - base, view.strides) for view in views)
    return DeviceLayout(PoolGeometry((specs,), shape[1]), shape[0], (parent.nbytes,), (places,))


ALL = slice(None)
MAPPED = {
    "layer first": DeviceLayout.layer_first(GEOMETRY, SLOTS),
    "page first": DeviceLayout.page_first(GEOMETRY, SLOTS),
    "page first by item size": DeviceLayout.page_first_by_item_size(GEOMETRY, SLOTS),
    "k and v packed per layer": of_parent((2, 3, 4, 2, 5), 0, 1),
    "k and v packed per slot": of_parent((3, 2, 4, 2, 5), (ALL, 0), (ALL, 1)),
    "k and v packed per token": of_parent((3, 4, 2, 2, 5), (ALL, ALL, 0), (ALL, ALL, 1)),
    "k and v packed in the last dim": of_parent((3, 4, 2, 10), (..., slice(0, 5)), (..., slice(5, 10))),
    "heads before tokens": of_parent((2, 3, 2, 4, 5), 0, 1, (0, 2, 1, 3)),
    "heads before slots": of_parent((2, 2, 3, 4, 5), 0, 1, (1, 2, 0, 3)),
    "heads before slots, k and v inside": of_parent((2, 2, 3, 4, 5), (ALL, 0), (ALL, 1), (1, 2, 0, 3)),
    "last dim outermost": of_parent((2, 5, 3, 4, 2), 0, 1, (1, 2, 3, 0)),
    "every second token": of_parent((2, 3, 8, 2, 5), (0, ALL, slice(0, 8, 2)), (1, ALL, slice(1, 8, 2))),
    "even and odd tokens": of_parent((3, 8, 2, 5), (ALL, slice(0, 8, 2)), (ALL, slice(1, 8, 2))),
    "padded slots": of_parent((3, 9, 2, 5), (ALL, slice(0, 4)), (ALL, slice(4, 8))),
}


@pytest.mark.parametrize("name", MAPPED)
def test_a_layout_is_a_bijection_and_its_blocks_spell_it_out(name: str) -> None:
    layout = MAPPED[name]
    bytes_of_slots = [element_bytes(layout.geometry, layout.places, slot) for slot in range(layout.slots)]
    every = [byte for found in bytes_of_slots for byte in found]
    assert len(set(every)) == len(every) == layout.slots * layout.geometry.slot_bytes
    layers = range(len(layout.geometry.layers))
    for slot, expected in enumerate(bytes_of_slots):
        assert block_bytes(layout.slot_blocks(), slot) == expected
        assert [byte for layer in layers for byte in block_bytes(layout.layer_blocks(layer), slot)] == expected


@given(geometries, st.sampled_from(sorted(LAYOUTS)), st.integers(1, 3))
def test_any_geometry_in_any_layout_is_a_bijection(geometry: PoolGeometry, name: str, slots: int) -> None:
    layout = LAYOUTS[name](geometry, slots)
    bytes_of_slots = [element_bytes(geometry, layout.places, slot) for slot in range(slots)]
    every = [byte for found in bytes_of_slots for byte in found]
    assert len(set(every)) == len(every) == slots * geometry.slot_bytes
    assert all(0 <= at < layout.buffers_bytes[buffer] for buffer, at in every)
    for slot, expected in enumerate(bytes_of_slots):
        assert block_bytes(layout.slot_blocks(), slot) == expected


@given(geometries, st.integers(1, 3))
def test_by_item_size_every_item_is_aligned_and_nothing_is_wasted(geometry: PoolGeometry, slots: int) -> None:
    layout = DeviceLayout.page_first_by_item_size(geometry, slots)
    assert sum(layout.buffers_bytes) == slots * geometry.slot_bytes
    for specs, places in zip(geometry.layers, layout.places, strict=True):
        for spec, place in zip(specs, places, strict=True):
            assert not any(step % spec.item_bytes for step in (place.offset_bytes, *place.strides_bytes))


def test_by_item_size_is_page_first_where_there_is_one() -> None:
    geometry = PoolGeometry.uniform(2, [TensorSpec("k", (2, 3), "float16"), TensorSpec("v", (5,), "bfloat16")], 4)
    assert DeviceLayout.page_first_by_item_size(geometry, 3) == DeviceLayout.page_first(geometry, 3)


@pytest.mark.parametrize("name", MAPPED)
def test_blocks_meet_end_to_end_in_the_host_page(name: str) -> None:
    layout = MAPPED[name]
    end = 0
    for block in layout.slot_blocks():
        assert block.host.start == end
        assert len(block.host) == np.prod(block.dims)
        end = block.host.stop
    assert end == layout.geometry.slot_bytes


def test_page_first_is_one_block_and_layer_first_one_per_tensor() -> None:
    assert [block.host for block in MAPPED["page first"].slot_blocks()] == [ByteRange(0, GEOMETRY.slot_bytes)]
    assert [len(MAPPED["layer first"].layer_blocks(layer)) for layer in range(2)] == [2, 2]
    assert MAPPED["k and v packed per slot"].slot_blocks()[0].is_contiguous


REFUSED = {
    "one tensor twice": lambda: of_parent((3, 4, 2, 5), ALL, ALL),
    "half of k is v": lambda: of_parent((3, 6, 2, 5), (ALL, slice(0, 4)), (ALL, slice(2, 6))),
    "k is v one slot on": lambda: of_parent((4, 4, 2, 5), slice(0, 3), slice(1, 4)),
    "heads shared": lambda: of_parent((3, 4, 3, 5), (ALL, ALL, slice(0, 2)), (ALL, ALL, slice(1, 3))),
    "backwards": lambda: of_parent((2, 3, 4, 2, 5), (0, slice(None, None, -1)), 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_memory_that_is_not_one_to_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"tensor 'k' of layer 0.*can't be mapped"):
        REFUSED[name]()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (TensorPlace(0, 0, (0, 8, 4)), "share bytes"),
        (TensorPlace(0, 0, (16, 4, 4)), "share bytes"),
        (TensorPlace(0, 0, (16, 8)), "2 strides"),
        (TensorPlace(0, 4, (16, 8, 4)), "takes bytes 4 to 52"),
        (TensorPlace(0, -4, (16, 8, 4)), "takes bytes -4"),
        (TensorPlace(1, 0, (16, 8, 4)), "buffer 1"),
    ],
)
def test_a_place_outside_its_buffer_or_onto_itself_is_refused(place: TensorPlace, message: str) -> None:
    geometry = PoolGeometry.uniform(1, [TensorSpec("k", (2,), "float32")], 2)
    DeviceLayout(geometry, 3, (48,), ((TensorPlace(0, 0, (16, 8, 4)),),))
    with pytest.raises(ConfigError, match=f"tensor 'k' of layer 0.*{message}"):
        DeviceLayout(geometry, 3, (48,), ((place,),))


def test_slots_and_places_must_fit_the_geometry() -> None:
    with pytest.raises(ConfigError, match="0 slots"):
        DeviceLayout.page_first(GEOMETRY, 0)
    with pytest.raises(ConfigError, match="one for each"):
        DeviceLayout(GEOMETRY, 1, (8,), ())


@given(st.permutations([1, 2, 4, 8]), st.permutations([1, 2, 4, 8]), st.booleans(), st.integers(0, 20))
def test_whatever_is_accepted_is_one_to_one(k: list[int], v: list[int], same_strides: bool, offset: int) -> None:
    geometry = PoolGeometry.uniform(1, [TensorSpec("k", (2,), "uint8"), TensorSpec("v", (2,), "uint8")], 2)
    places = (TensorPlace(0, 0, tuple(k[:3])), TensorPlace(0, offset, tuple((k if same_strides else v)[:3])))
    every = [byte for slot in range(2) for byte in element_bytes(geometry, (places,), slot)]
    if len(set(every)) < len(every):
        with pytest.raises(ConfigError, match="share bytes"):
            DeviceLayout(geometry, 2, (100,), (places,))


def test_a_flat_or_paged_tensor_has_one_place() -> None:
    spec = TensorSpec("k", (2, 3), "float32")
    flat, paged = (12, 2, 3), (3, 4, 2, 3)
    places = [
        TensorPlace.of_tensor(
            spec, 3, 4, buffer=0, offset_bytes=0, shape=shape, strides_bytes=np.zeros(shape, "f4").strides
        )
        for shape in (flat, paged)
    ]
    assert places[0] == places[1]


@pytest.mark.parametrize("shape", [(11, 2, 3), (4, 3, 2, 3), (3, 2, 4, 3), (3, 4, 6), (72,)])
def test_a_tensor_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"'k' has shape .*must be \(3, 4, 2, 3\) or \(12, 2, 3\)"):
        TensorPlace.of_tensor(
            TensorSpec("k", (2, 3), "float32"),
            3,
            4,
            buffer=0,
            offset_bytes=0,
            shape=shape,
            strides_bytes=(4,) * len(shape),
        )
