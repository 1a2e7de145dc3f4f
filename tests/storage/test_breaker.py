"""A breaker opens after failures or a call that hangs, tries again after a pause, and closes when all is well."""

import pytest

from hicache.storage import BreakerOptions, BreakerState
from hicache.storage.breaker import Breaker
from tests.world import Clock

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class Store:
    """Calls through a breaker, one at a time or held inside."""

    def __init__(self, failures: int = 3) -> None:
        self.clock = Clock()
        self.breaker = Breaker(BreakerOptions(failures, slow_s=5.0, pause_s=10.0), self.clock)

    def call(self, *, ok: bool, takes_s: float = 0.0) -> bool:
        """Whether the call came to the store."""
        with self.breaker.call() as call:
            if call is None:
                return False
            self.clock.now_s += takes_s
            call.ok = ok
            return True

    @property
    def state(self) -> BreakerState:
        return self.breaker.stats().state

    def opened(self) -> "Store":
        for _ in range(3):
            self.call(ok=False)
        return self


def test_failures_in_a_row_open_it_and_one_success_between_them_does_not():
    store = Store()
    for ok in (False, False, True, False, False):
        assert store.call(ok=ok)
        assert store.state is CLOSED
    store.call(ok=False)
    assert store.state is OPEN
    assert not store.call(ok=True)
    assert (store.breaker.stats().opened, store.breaker.stats().refused_calls) == (1, 1)


def test_a_call_that_raises_has_failed():
    store = Store(failures=1)
    with pytest.raises(OSError, match="gone"), store.breaker.call():
        raise OSError("gone")
    assert store.state is OPEN


def test_after_the_pause_one_call_decides():
    store = Store().opened()
    store.clock.now_s = 9.9
    assert store.breaker.refuses
    store.clock.now_s = 10.0
    assert store.state is HALF_OPEN
    assert not store.breaker.refuses
    with store.breaker.call() as probe:
        assert probe is not None
        assert store.breaker.refuses
        assert not store.call(ok=True), "others wait for the one that tries"
        probe.ok = True
    assert store.state is CLOSED
    assert store.call(ok=True)


def test_a_probe_that_fails_begins_another_pause():
    store = Store().opened()
    store.clock.now_s = 10.0
    assert store.call(ok=False)
    assert store.state is OPEN
    store.clock.now_s = 19.9
    assert not store.call(ok=True)
    store.clock.now_s = 20.0
    assert store.call(ok=True)
    assert store.state is CLOSED
    assert store.breaker.stats().opened == 1, "it was never closed in between"


def test_a_call_that_hangs_opens_it_while_it_hangs_and_nothing_follows_it_in():
    store = Store()
    with store.breaker.call() as hanging:
        assert hanging is not None
        store.clock.now_s = 5.0
        assert not store.breaker.refuses
        store.clock.now_s = 5.1
        assert store.breaker.refuses
        store.clock.now_s = 60.0
        assert not store.call(ok=True), "no second thread gets stuck, however long it hangs"
        hanging.ok = True
    assert store.state is OPEN
    store.clock.now_s = 70.0
    assert store.call(ok=True)
    assert store.state is CLOSED


def test_a_slow_call_opens_it_although_it_brought_something():
    store = Store()
    store.call(ok=True, takes_s=5.0)
    assert store.state is CLOSED
    store.call(ok=True, takes_s=5.1)
    assert store.state is OPEN


def test_calls_that_were_inside_when_it_opened_change_nothing():
    store = Store()
    with store.breaker.call() as inside:
        store.opened()
        assert inside is not None
        inside.ok = True
    assert store.state is OPEN
