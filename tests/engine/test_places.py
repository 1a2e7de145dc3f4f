"""The queue has so many places and no more; who gets none is told when to ask again."""

import threading

import pytest

from hicache.engine.places import MOST_WAIT_S, Places
from hicache.errors import CapacityError, QueueFullError


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def refused(places: Places, *requests: int) -> int:
    with pytest.raises(QueueFullError) as caught:
        places.take(requests)
    return caught.value.retry_after_s


def test_a_place_is_taken_and_left_once():
    places = Places(3)
    places.take([1, 2, 3])
    refused(places, 4)
    places.leave(2)
    places.leave(2)
    places.leave(9)
    assert (places.queued, places.refused) == (2, 1)
    places.take([4])
    assert places.queued == 3


def test_several_get_places_together_or_none_does():
    places = Places(3)
    places.take([1, 2])
    refused(places, 3, 4)
    assert (places.queued, places.refused) == (2, 2)
    with pytest.raises(CapacityError, match="4 prompts at once, and the queue holds 3"):
        places.take([5, 6, 7, 8])
    assert (places.queued, places.refused) == (2, 2)


def test_the_wait_follows_from_the_rate_at_which_places_came_free():
    clock = Clock()
    places = Places(10, clock)
    places.take(range(10))
    assert refused(places, 10) == MOST_WAIT_S, "nobody has left so far"
    for request in range(4):
        clock.now_s = 5.0 * request
        places.leave(request)
        places.take([20 + request])
    clock.now_s = 20.0
    assert refused(places, 30) == 5
    assert refused(places, 30, 31, 32) == 15
    clock.now_s = 1e6
    assert refused(places, 30) == MOST_WAIT_S


def test_the_wait_is_a_second_at_least():
    clock = Clock()
    places = Places(1, clock)
    places.take([1])
    places.leave(1)
    places.take([2])
    assert refused(places, 3) == 1


def test_threads_never_take_more_than_there_are():
    places, most = Places(20), []

    def come_and_go(thread: int) -> None:
        for number in range(300):
            request = thread * 1000 + number
            try:
                places.take([request])
            except QueueFullError:
                continue
            most.append(places.queued)
            if number % 5:
                places.leave(request)

    threads = [threading.Thread(target=come_and_go, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert max(most) <= 20
    assert places.queued == 20
