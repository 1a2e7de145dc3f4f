"""The cache knows what the engine computes in a second, from the steps that compute prompts."""

import pytest

from hicache.engine.pace import WEIGHT, Pace


class Told:
    """A cache that keeps what it is told."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def tell_compute_rate(self, tokens_per_s: float) -> None:
        self.rates.append(tokens_per_s)


def test_prompts_are_measured_and_newer_steps_count_more():
    told = Told()
    pace = Pace(told)
    pace.step(100, 2.0)
    pace.step(0, 5.0)
    pace.step(100, 0.0)
    pace.step(100, 1.0)
    assert told.rates == [50.0, pytest.approx(50.0 + WEIGHT * 50.0)]
