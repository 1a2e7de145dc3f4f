"""A simulator is worth what it finds: each kind of bug within 200 seeds, and twice the same way."""

import pytest

from hicache.simulate.many import run_seed
from tests.simulate.planted import BUGS

STEPS = 300
MOST_SEEDS = 200


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_and_its_seed_replays_it(bug, monkeypatch):
    plant, first = BUGS[bug]
    plant(monkeypatch)
    found = next((one for seed in range(first, MOST_SEEDS) if (one := run_seed(seed, STEPS)).failure), None)
    assert found is not None, f"{bug} was not found"
    again = run_seed(found.seed, STEPS)
    assert again == found
    monkeypatch.undo()
    assert run_seed(found.seed, STEPS).failure is None


@pytest.mark.full
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_from_the_first_seed_on(bug, monkeypatch):
    BUGS[bug][0](monkeypatch)
    assert any(run_seed(seed, STEPS).failure for seed in range(MOST_SEEDS))
