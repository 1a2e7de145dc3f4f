"""Whoever is passed over, made to give way while first, or left without a token is named."""

from types import SimpleNamespace

import pytest

from hicache.simulate.broken import RuleError
from hicache.simulate.content import Sight, alphabet
from hicache.simulate.requests import Asked
from hicache.simulate.truth import Truth
from hicache.simulate.turns import PATIENCE_STEPS, Turns

KNOWN = Truth(alphabet(64), (Sight("kv", 1),)).tell([1, 2, 3], 3)
EARLY = Asked(1, KNOWN, "tenant", 0.0, None)
LATE = Asked(2, KNOWN, "tenant", 5.0, None)
URGENT = Asked(3, KNOWN, "tenant", 5.0, None, priority=1)


def entry(one: Asked, *, ready: bool = True) -> SimpleNamespace:
    return SimpleNamespace(request=SimpleNamespace(id=one.id), ready=ready)


def lineup(waiting=(), running=(), away=()) -> SimpleNamespace:
    return SimpleNamespace(
        waiting=list(waiting), running=[entry(one) for one in running], away=[entry(one) for one in away]
    )


def test_a_priority_counts_as_much_as_waiting_does():
    turns = Turns(lineup(), ageing_s=3.0)
    assert sorted([URGENT, LATE, EARLY], key=turns.turn) == [EARLY, URGENT, LATE]
    turns = Turns(lineup(), ageing_s=6.0)
    assert sorted([URGENT, LATE, EARLY], key=turns.turn) == [URGENT, EARLY, LATE]


@pytest.mark.parametrize("lists", [{"waiting": [entry(EARLY)]}, {"away": [EARLY]}])
def test_nobody_is_let_in_before_an_earlier_one(lists):
    with pytest.raises(RuleError, match=r"request 2 was let in before \[1\]"):
        Turns(lineup(**lists), 1.0).check_admitted(LATE, [EARLY, LATE])


def test_whoever_runs_or_waits_for_storage_may_be_passed():
    Turns(lineup(running=[EARLY]), 1.0).check_admitted(LATE, [EARLY, LATE])
    Turns(lineup([entry(EARLY, ready=False)]), 1.0).check_admitted(LATE, [EARLY, LATE])
    Turns(lineup([entry(LATE)]), 1.0).check_admitted(EARLY, [EARLY, LATE])


def test_the_first_does_not_give_way():
    there = lineup(running=[EARLY, LATE])
    turns = Turns(there, 1.0)
    turns.check_step([EARLY, LATE], quiet=True)
    there.running.pop()
    turns.check_step([EARLY, LATE], quiet=True)
    there.running.pop()
    with pytest.raises(RuleError, match="request 1 had to give way"):
        turns.check_step([EARLY, LATE], quiet=True)


def test_the_first_does_not_wait_for_ever_for_nothing():
    turns = Turns(lineup([entry(EARLY)]), 1.0)
    for _ in range(2 * PATIENCE_STEPS):
        turns.check_step([EARLY], quiet=False)
    for _ in range(PATIENCE_STEPS):
        turns.check_step([EARLY], quiet=True)
    with pytest.raises(RuleError, match="got no token"):
        turns.check_step([EARLY], quiet=True)
