"""A call that is stuck is left alone, and only so many are."""

import threading

import pytest

from hicache.storage.mooncake.guard import Guard
from hicache.storage.remote import Deadline


def test_answers_and_errors_come_through():
    guard = Guard()
    assert guard.call(lambda: 7, Deadline(30.0)) == 7
    with pytest.raises(KeyError):
        guard.call(lambda: {}["x"], Deadline(30.0))


def test_calls_that_are_stuck():
    guard, go = Guard(), threading.Event()
    for _ in range(4):
        with pytest.raises(TimeoutError, match="in time"):
            guard.call(lambda: go.wait(60.0), Deadline(0.05))
    with pytest.raises(TimeoutError, match="earlier calls"):
        guard.call(lambda: 7, Deadline(30.0))
    go.set()
    while True:
        try:
            assert guard.call(lambda: 7, Deadline(30.0)) == 7
            break
        except TimeoutError:
            continue
