"""Half of the seeds, in a file of their own, so that they run beside the others."""

import pytest

from tests.simulate.test_seeds import PER_TEST, nothing_breaks

FULL = [pytest.param(first, marks=pytest.mark.full) for first in range(1100, 2000, PER_TEST)]


@pytest.mark.parametrize("first", [*range(100, 200, PER_TEST), *FULL])
def test_nothing_breaks_further_on(first):
    nothing_breaks(first)
