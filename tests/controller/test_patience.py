"""How long a request waits is a pure function: its borders."""

import pytest

from hicache.controller.patience import Patience, Prices, patience_s

KNOWN = Prices(latency_s=0.5, bytes_per_s=100.0, tokens_per_s=10.0)


@pytest.mark.parametrize(
    ("policy", "pages", "limit_s"),
    [
        ("timeout", 0, 2.0),
        ("timeout", 8, 6.0),
        ("timeout", 16, 10.0),
        ("timeout", 17, 10.0),
        ("cost-aware", 8, 6.0),
        ("best_effort", 8, 6.0),
        ("wait_complete", 0, 10.0),
    ],
)
def test_the_limit_is_base_plus_pages_and_never_above_the_most(policy, pages, limit_s):
    patience = Patience(policy, timeout_s=2.0, page_timeout_s=0.5, most_s=10.0)
    assert patience.limit_s(pages) == limit_s
    assert patience.waits is (policy != "best_effort")


@pytest.mark.parametrize(
    ("size_bytes", "waits_s"),
    [(0, 1.0), (49, 1.0), (50, 1.0), (51, 0.0), (10**12, 0.0)],
)
def test_a_store_is_waited_for_up_to_the_point_where_computing_takes_as_long(size_bytes, waits_s):
    """10 tokens take 1 s; latency leaves half of it, in which 50 bytes come."""
    assert patience_s(KNOWN, 10, size_bytes) == waits_s


def test_what_is_not_known_is_tried_for_as_long_as_computing_takes():
    assert patience_s(Prices(tokens_per_s=10.0), 30, 10**12) == 3.0
    assert patience_s(Prices(bytes_per_s=1.0), 30, 10**12) is None
    assert patience_s(Prices(), 30, 1) is None


def test_a_store_that_brings_nothing_is_not_waited_for():
    assert patience_s(Prices(bytes_per_s=0.0, tokens_per_s=10.0), 30, 1) == 0.0


def test_no_tokens_to_gain_are_worth_nothing():
    assert patience_s(Prices(bytes_per_s=100.0, tokens_per_s=10.0), 0, 1) == 0.0
