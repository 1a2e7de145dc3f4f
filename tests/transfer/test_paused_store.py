"""Transfers that no thread has begun end at once when their store is left alone; the one that hangs keeps its slots."""

import numpy as np

from hicache.storage import BreakerOptions, PageStore
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import HeldBackend, Operation
from hicache.transfer import Fetch, Query, Store, StoredPages, ThreadExecutor
from tests.storage.engines import wait_until
from tests.storage.test_guarded import KEYS, pages


def ended(executor: ThreadExecutor, count: int) -> dict[int, str | None]:
    answers: dict[int, str | None] = {}

    def polled() -> bool:
        answers.update((one.id, one.error) for one in executor.poll())
        return len(answers) >= count

    wait_until(polled, f"{count} transfers")
    return answers


def test_what_waits_behind_a_call_that_hangs_is_refused():
    held = HeldBackend(MemoryBackend())
    store = PageStore(held, BreakerOptions(slow_s=0.05, pause_s=0.05))
    executor = ThreadExecutor(fetch_workers=1)
    content = (StoredPages("kv", tuple(KEYS), tuple(pages(0))),)
    held.hold(Operation.READ)
    held.hold(Operation.WRITE)
    executor.submit(Fetch(1, store, content))
    executor.submit(Store(2, store, content))
    for number in (3, 5):
        executor.submit(Fetch(number, store, content))
        executor.submit(Query(number + 10, store, {"kv": tuple(KEYS)}))
        executor.submit(Store(number + 20, store, content))
    assert held.wait_until_held(Operation.READ)
    assert held.wait_until_held(Operation.WRITE)
    answers = ended(executor, 6)
    assert answers == dict.fromkeys((3, 5, 13, 15, 23, 25), "the store is paused")
    executor.submit(Query(31, store, {"kv": tuple(KEYS)}))
    assert ended(executor, 1) == {31: "the store is paused"}
    held.release(Operation.READ)
    held.release(Operation.WRITE)
    assert ended(executor, 2) == {1: None, 2: None}

    def found() -> bool:
        executor.submit(Query(99, store, {"kv": tuple(KEYS)}))
        answer = None
        while answer is None:
            answer = next(iter(executor.poll()), None)
        return bool(np.all(answer.good.get("kv", False)))

    wait_until(found, "the store's return")
    executor.close()
