"""Requests run side by side; their call ends in time and what comes later is thrown away."""

import threading
from collections.abc import Callable

import pytest

pytest.importorskip("obstore", reason="the s3 store is not installed: pip install 'hicache[s3]'")

from obstore.exceptions import GenericError

from hicache.storage.remote import Deadline
from hicache.storage.s3.requests import Answered, Failed, Requests, explain, has_status


def test_each_has_its_outcome():
    def prepare(i: int) -> Callable[[], int]:
        def request() -> int:
            if i == 1:
                raise FileNotFoundError
            if i == 2:
                raise ConnectionError("no")
            return i

        return request

    requests = Requests(2)
    assert dict(requests.run(5, prepare, Deadline(30.0))) == {
        0: Answered(0),
        1: Answered(None),
        2: Failed("no"),
        3: Answered(3),
        4: Answered(4),
    }
    requests.close()


def test_what_is_late_is_given_up_and_nothing_begins_afterwards():
    go, prepared = threading.Event(), []

    def prepare(i: int) -> Callable[[], int]:
        prepared.append(i)
        return lambda: i if i == 0 or go.wait(30.0) else -1

    requests = Requests(2)
    outcomes = list(requests.run(6, prepare, Deadline(0.3)))
    assert outcomes[0] == (0, Answered(0))
    assert sorted(outcomes[1:]) == [(i, Failed("does not answer in time")) for i in range(1, 6)]
    assert prepared == [0, 1, 2]
    go.set()
    assert list(requests.run(1, lambda i: lambda: 7, Deadline(30.0))) == [(0, Answered(7))]
    requests.close()


def test_no_more_run_at_a_time_than_there_are_connections():
    lock, running, most = threading.Lock(), 0, 0
    together = threading.Barrier(3)

    def request() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(30.0)
        with lock:
            running -= 1

    requests = Requests(3)
    assert len(list(requests.run(12, lambda i: request, Deadline(60.0)))) == 12
    assert most == 3
    requests.close()


def test_what_is_said_is_short_and_has_no_address():
    text = (
        "Generic S3 error: Error performing GET http://h/b/k?secret in 2.4ms - "
        "Server returned non-2xx status code: 503 Slow Down: <xml>\n\nDebug source: much more"
    )
    error = GenericError(text)
    assert explain(error) == "Generic S3 error: Server returned non-2xx status code: 503 Slow Down: <xml>"
    assert has_status(error, 503) and not has_status(error, 404)
    assert len(explain(GenericError("x" * 10_000))) == 300
