"""Coverage against brute force: for every pattern of present pages, ask which tokens the next one needs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.coverage import Checkpoint, Coverage, Full, Window, longest_usable
from hicache.errors import ConfigError

coverages = st.one_of(st.just(Full()), st.builds(Window, st.integers(1, 40)), st.just(Checkpoint()))
patterns = st.lists(st.booleans(), max_size=12)
page_sizes = st.integers(1, 9)


def needed_pages(coverage: Coverage, pages: int, page_size: int) -> set[int]:
    """Page by page, token by token, what resuming after `pages` pages reads."""
    match coverage:
        case Full():
            return set(range(pages))
        case Window(tokens):
            next_token = pages * page_size
            seen = range(max(0, next_token - tokens + 1), next_token)
            return {token // page_size for token in seen}
        case Checkpoint():
            return {pages - 1} if pages else set()


@given(coverages, st.integers(0, 12), page_sizes)
def test_required_is_what_the_next_token_reads(coverage: Coverage, pages: int, page_size: int) -> None:
    required = coverage.required(pages, page_size)
    assert set(range(required.start, required.stop)) == needed_pages(coverage, pages, page_size)


@given(coverages, patterns, page_sizes)
def test_resumable_is_true_exactly_where_all_needed_pages_are_present(
    coverage: Coverage, present: list[bool], page_size: int
) -> None:
    resumable = coverage.resumable(np.array(present, bool), page_size)
    assert resumable.dtype == bool
    assert resumable.tolist() == [
        all(present[page] for page in needed_pages(coverage, pages, page_size)) for pages in range(len(present) + 1)
    ]


@given(st.data(), st.integers(0, 12), page_sizes)
def test_longest_usable_is_the_longest_that_every_pool_can_resume_at(
    data: st.DataObject, pages: int, page_size: int
) -> None:
    pools = data.draw(
        st.lists(st.tuples(coverages, st.lists(st.booleans(), min_size=pages, max_size=pages)), min_size=1, max_size=4)
    )
    usable = [
        length
        for length in range(pages + 1)
        if all(present[page] for coverage, present in pools for page in needed_pages(coverage, length, page_size))
    ]
    found = longest_usable([(coverage, np.array(present, bool)) for coverage, present in pools], page_size)
    assert found == usable[-1]


def test_no_pools_make_nothing_usable() -> None:
    assert longest_usable([], 4) == 0


def test_a_window_that_sees_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="window of 0 tokens"):
        Window(0)
