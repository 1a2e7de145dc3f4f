"""Row copies against a loop, for rows that lie in runs and rows that do not, small and large."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.pools import copy_rows

ROWS = 12


@pytest.mark.parametrize("row_shape", [(3,), (2, 5), (1500,), (2, 700)])
@given(data=st.data())
def test_every_row_arrives_and_no_other_changes(row_shape: tuple[int, ...], data: st.DataObject) -> None:
    pairs = st.permutations(range(ROWS))
    count = data.draw(st.integers(0, ROWS))
    shift = data.draw(st.booleans())
    to = list(range(count)) if shift else data.draw(pairs)[:count]
    at = data.draw(pairs)[:count]
    source = np.random.default_rng(0).integers(0, 256, (ROWS, *row_shape), np.uint8)
    target = np.zeros_like(source)
    expected = target.copy()
    for row, origin in zip(to, at, strict=True):
        expected[row] = source[origin]
    copy_rows(target, np.array(to, np.int32), source, np.array(at, np.int32))
    assert np.array_equal(target, expected)
