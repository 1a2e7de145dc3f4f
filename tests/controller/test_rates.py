"""The rate of a store counts the time in which it was busy, whoever asked, and is forgotten in time."""

import pytest

from hicache.controller.rates import MEMORY_S, WEIGHT, StoreRates


def test_fetches_side_by_side_count_their_time_once():
    rates = StoreRates()
    rates.began(100, 0.0)
    rates.began(300, 0.0)
    assert rates.waiting_bytes == 400
    rates.ended(100, 100, 1.0)
    rates.ended(300, 300, 2.0)
    assert rates.waiting_bytes == 0
    first, second = 100 / 1.0, 300 / 1.0
    assert rates.prices(2.0, None).bytes_per_s == pytest.approx(first + WEIGHT * (second - first))


def test_idle_time_between_fetches_does_not_count():
    rates = StoreRates()
    for start_s in (0.0, 50.0):
        rates.began(100, start_s)
        rates.ended(100, 100, start_s + 1.0)
    assert rates.prices(51.0, None).bytes_per_s == pytest.approx(100.0)


def test_what_fails_takes_time_and_brings_nothing():
    rates = StoreRates()
    rates.began(100, 0.0)
    rates.ended(100, 0, 2.0)
    assert rates.prices(2.0, None).bytes_per_s == 0.0


def test_fetches_that_took_no_time_are_measured_with_the_next():
    rates = StoreRates()
    rates.began(100, 1.0)
    rates.ended(100, 100, 1.0)
    assert rates.prices(1.0, None).bytes_per_s is None
    rates.began(100, 1.0)
    rates.ended(100, 100, 2.0)
    assert rates.prices(2.0, None).bytes_per_s == pytest.approx(200.0)


def test_a_rate_is_forgotten_so_that_the_store_is_tried_again():
    rates = StoreRates()
    rates.answered(0.25)
    rates.began(100, 0.0)
    rates.ended(100, 100, 1.0)
    known = rates.prices(1.0 + MEMORY_S, 7.0)
    assert (known.latency_s, known.bytes_per_s, known.tokens_per_s) == (0.25, 100.0, 7.0)
    assert rates.prices(1.1 + MEMORY_S, 7.0).bytes_per_s is None


def test_fetches_that_end_at_one_time_count_together():
    rates = StoreRates()
    rates.began(100, 0.0)
    rates.began(300, 0.0)
    rates.ended(100, 100, 1.0)
    rates.ended(300, 300, 1.0)
    assert rates.prices(1.0, None).bytes_per_s == pytest.approx(400.0)
