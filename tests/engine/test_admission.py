"""Claims become slots pool by pool, and who is let in leaves room for what runs."""

import numpy as np
import pytest

from hicache.cache.room import most_slots
from hicache.coverage import Checkpoint, Coverage, Full, Window
from hicache.engine.admission import Budget, Claim

PAGE = 4
CHUNK = 8
POOLS: dict[str, Coverage] = {"kv": Full(), "swa": Window(9), "state": Checkpoint()}


@pytest.fixture
def budget() -> Budget:
    return Budget(POOLS, PAGE, CHUNK)


@pytest.mark.parametrize(
    ("claim", "slots"),
    [
        (Claim(0, 40, 48, windows=True, states=1), {"kv": 12, "swa": 2 + 3, "state": 1}),
        (Claim(7, 40, 48, windows=True, states=2), {"kv": 5, "swa": 3, "state": 2}),
        (Claim(0, 5, 40, windows=True, states=1), {"kv": 10, "swa": 2 + 1, "state": 1}),
        (Claim(2, 40, 48), {"kv": 10, "swa": 3, "state": 0}),
        (Claim(9, 36, 48), {"kv": 3, "swa": 1, "state": 0}),
        (Claim(10, 39, 40), {"kv": 0, "swa": 0, "state": 0}),
        (Claim(12, 40, 40), {"kv": 0, "swa": 0, "state": 0}),
    ],
)
def test_what_a_claim_takes(budget, claim, slots):
    assert budget.slots(claim) == slots


@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_must_have_room(budget, pool):
    claim = Claim(0, 40, 40, windows=True, states=1)
    enough = budget.slots(claim)
    assert budget.admits(enough, claim, [])
    assert not budget.admits({**enough, pool: enough[pool] - 1}, claim, [])


def test_room_for_what_runs_is_kept(budget):
    new, growing = Claim(0, 40, 40, windows=True, states=1), Claim(5, 20, 24)
    room = {"kv": 12, "swa": 20, "state": 3}
    assert budget.admits(room, new, [growing, growing])
    assert not budget.admits(room, new, [growing, growing, growing])
    assert not budget.admits({**room, "kv": -1}, Claim(3, 12, 12), [])


def test_what_others_would_leave_counts_in_every_pool(budget):
    room = {"kv": 1, "swa": 1, "state": 0}
    assert budget.freed(room, [3, 20]) == {"kv": 24, "swa": 1 + 3 + 5, "state": 2}


def test_whoever_is_let_in_at_first_never_holds_more_than_was_said_to_fit():
    random = np.random.default_rng(0)
    for _ in range(300):
        page, chunk, total = (int(random.integers(1, most)) for most in (9, 40, 200))
        coverage = [Full(), Window(int(random.integers(1, 60))), Checkpoint()][random.integers(3)]
        claim = Claim(0, total, total, windows=True, states=1)
        assert Budget({"x": coverage}, page, chunk).slots(claim)["x"] == most_slots(coverage, total, chunk, page)
