"""Snapshots are wanted where reuse is likely, and chunks end there."""

from hypothesis import given
from hypothesis import strategies as st

from hicache.engine.snapshots import boundaries, next_stop


@given(
    page=st.integers(1, 9),
    start_pages=st.integers(0, 12),
    prompt=st.integers(1, 90),
    interval=st.integers(0, 30),
    shared=st.lists(st.integers(0, 90), max_size=4),
)
def test_snapshots_are_at_page_boundaries_where_reuse_is_likely(
    page: int, start_pages: int, prompt: int, interval: int, shared: list[int]
):
    start = start_pages * page
    expected = []
    grid = next(pages * page for pages in range(1, 32) if pages * page >= interval) if interval else 0
    for position in range(page, prompt, page):
        ends_shared = any(position <= tokens < position + page for tokens in shared)
        is_last = position + page >= prompt
        if position > start and (ends_shared or is_last or (grid and position % grid == 0)):
            expected.append(position)
    assert list(boundaries(page, start, prompt, interval, shared)) == expected


@given(st.lists(st.integers(0, 60)), st.integers(0, 60), st.integers(1, 60))
def test_a_chunk_goes_to_the_next_stop_at_most(stops: list[int], position: int, tokens: int):
    count = 1
    while count < tokens and position + count not in stops:
        count += 1
    assert next_stop(stops, position, tokens) == count
