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


@pytest.mark.parametrize("seed", range(30))
def test_nobody_ever_holds_more_than_was_said_when_let_in(seed):
    """Slots are counted here from what each token sees, whatever the chunks; the most of all ways is what is said."""
    random = np.random.default_rng(seed)
    page, chunk, window = (int(random.integers(1, most)) for most in (9, 40, 60))
    total = 4 * (page + chunk + window)
    for coverage in (Full(), Window(window)):
        said = Budget({"x": coverage}, page, chunk).slots(Claim(0, total, total, windows=True))["x"]
        held = [most_held(coverage, page, total, [first, chunk]) for first in range(1, chunk + 1)]
        assert max(held) == said == most_slots(coverage, total, chunk, page)
        mixed = random.integers(1, chunk + 1, total).tolist()
        assert most_held(coverage, page, total, mixed) <= said


def most_held(coverage: Full | Window, page: int, total: int, chunks: list[int]) -> int:
    """The most pages that lie between the first that is seen and the last that is written; the last chunk repeats."""
    most = done = step = 0
    while done < total:
        stop = min(total, done + chunks[min(step, len(chunks) - 1)])
        shared = done // page * page
        seen = 0 if isinstance(coverage, Full) else max(0, shared - coverage.tokens + 1)
        most = max(most, (stop - 1) // page - seen // page + 1)
        done, step = stop, step + 1
    return most
