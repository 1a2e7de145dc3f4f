"""A geometry cuts a page into ranges that meet end to end, and its fingerprint tells different pages apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.layout import ITEM_BYTES, PackedLayout, PoolGeometry, TensorSpec

specs = st.builds(
    TensorSpec,
    st.sampled_from(["k", "v", "conv"]),
    st.lists(st.integers(1, 5), max_size=3).map(tuple),
    st.sampled_from(sorted(ITEM_BYTES)),
)
geometries = st.builds(
    PoolGeometry,
    st.lists(st.lists(specs, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4).map(tuple),
    st.integers(1, 5),
)


@given(geometries)
def test_parts_and_layers_meet_end_to_end_and_fill_the_slot(geometry: PoolGeometry) -> None:
    end = 0
    for layer, tensors in enumerate(geometry.layers):
        assert geometry.layer_range(layer).start == end
        for index, spec in enumerate(tensors):
            part = geometry.part(layer, index)
            assert part.start == end
            assert len(part) == geometry.tokens_per_slot * spec.token_bytes
            end = part.stop
        assert geometry.layer_range(layer).stop == end
    assert geometry.slot_bytes == end


@given(geometries, st.lists(geometries, max_size=3))
def test_packed_drafts_lie_after_the_owner_in_order(own: PoolGeometry, drafts: list[PoolGeometry]) -> None:
    layout = PackedLayout(own, tuple(drafts))
    end = layout.own_range.stop
    assert (layout.own_range.start, end) == (0, own.slot_bytes)
    for index, draft in enumerate(drafts):
        block = layout.draft_range(index)
        assert (block.start, len(block)) == (end, draft.slot_bytes)
        end = block.stop
    assert layout.page_bytes == end


@given(geometries, geometries)
def test_fingerprints_differ_exactly_when_geometries_do(a: PoolGeometry, b: PoolGeometry) -> None:
    assert (a.fingerprint == b.fingerprint) == (a == b)
    assert PackedLayout(a).fingerprint == a.fingerprint
    assert PackedLayout(a, (b,)).fingerprint not in (a.fingerprint, PackedLayout(b, (a, a)).fingerprint)


def test_a_fingerprint_never_changes_between_releases() -> None:
    geometry = PoolGeometry.uniform(2, [TensorSpec("k", (3, 64), "bfloat16")], 16)
    assert geometry.fingerprint == "db0690dd5c1667663676da1a689afeb3d60efada01eb654cb9010bc67f3c50c3"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorSpec("k", (2,), "float12"), "float12"),
        (lambda: TensorSpec("k", (2, 0), "float32"), "size below 1"),
        (lambda: PoolGeometry.uniform(1, [TensorSpec("k", (2,), "float32")], 0), "tokens_per_slot is 0"),
        (lambda: PoolGeometry.uniform(0, [TensorSpec("k", (2,), "float32")], 1), "at least one layer"),
        (lambda: PoolGeometry.uniform(2, [], 1), "at least one tensor"),
    ],
)
def test_what_holds_no_bytes_is_refused(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
