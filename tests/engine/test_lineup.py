"""Turns: priority before age, and nobody is overtaken for ever."""

from itertools import pairwise
from typing import Any, cast

import numpy as np

from hicache.engine import SamplingParams
from hicache.engine.lineup import Lineup, Waiting
from hicache.engine.request import Request
from hicache.engine.sequence import Sequence
from tests.engine.bench import NAMESPACE, Letters


class Stub:
    """A sequence, as far as the lineup looks at it."""

    def __init__(self, request: Request) -> None:
        self.request = request


class Ticket:
    done = True


def request(number: int, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=1)
    return Request(number, [1], params, NAMESPACE, Letters(), frozenset(), lambda chunk: None, 0.0, priority=priority)


def come(lineup: Lineup, number: int, now_s: float, priority: int = 0, ticket: Any = None) -> Request:
    one = request(number, priority)
    lineup.come(one, now_s)
    lineup.wait(Waiting(one, ticket))
    return one


def stub(one: Request) -> Sequence:
    return cast(Sequence, Stub(one))


def test_the_queue_goes_by_priority_then_by_arrival():
    lineup = Lineup(ageing_s=1000.0)
    for number, priority in enumerate([0, 5, 0, -5, 5]):
        come(lineup, number, float(number), priority)
    assert [one.request.id for one in lineup.waiting] == [1, 4, 0, 2, 3]


def test_requests_of_one_moment_keep_their_order():
    lineup = Lineup(ageing_s=10.0)
    for number in range(5):
        come(lineup, number, 0.0)
    assert [one.request.id for one in lineup.waiting] == [0, 1, 2, 3, 4]


def test_whoever_has_waited_long_enough_goes_before_higher_priority():
    lineup = Lineup(ageing_s=10.0)
    come(lineup, 0, 0.0)
    come(lineup, 1, 29.0, priority=3)
    come(lineup, 2, 31.0, priority=3)
    assert [one.request.id for one in lineup.waiting] == [1, 0, 2]


def test_nobody_is_overtaken_by_more_than_what_came_within_its_ageing():
    random = np.random.default_rng(3)
    lineup, came = Lineup(ageing_s=2.0), []
    for number in range(400):
        came.append((come(lineup, number, number * 0.1, int(random.integers(-5, 6))), number * 0.1))
    times = dict(came)
    order = [one.request for one in lineup.waiting]
    for place, one in enumerate(order):
        for before in order[:place]:
            assert times[before] - times[one] <= 2.0 * max(0, before.priority - one.priority)
    assert all(one.turn <= other.turn for one, other in pairwise(order))


def test_next_is_the_first_turn_of_those_that_are_ready_and_those_that_are_away():
    lineup = Lineup(ageing_s=10.0)
    assert lineup.next() is None
    pending, ready = Ticket(), Ticket()
    pending.done = False
    come(lineup, 0, 0.0, ticket=pending)
    come(lineup, 1, 2.0, ticket=ready)
    head = lineup.next()
    assert isinstance(head, Waiting) and head.request.id == 1
    early, late = request(2), request(3)
    for one, now_s in ((late, 3.0), (early, 1.0)):
        lineup.come(one, now_s)
    sequences = {one: stub(one) for one in (late, early)}
    lineup.leave(sequences[late])
    assert lineup.next() is head
    lineup.leave(sequences[early])
    assert lineup.next() is sequences[early]
    pending.done = True
    head = lineup.next()
    assert isinstance(head, Waiting) and head.request.id == 0


def test_only_a_lower_priority_with_a_later_turn_gives_way_the_latest_first():
    lineup = Lineup(ageing_s=10.0)
    running = {}
    for number, (now_s, priority) in enumerate([(0.0, 1), (25.0, 0), (26.0, 0), (27.0, 2), (28.0, -1)]):
        one = request(number, priority)
        lineup.come(one, now_s)
        running[number] = stub(one)
        lineup.run(running[number])
    asking = request(9, 2)
    lineup.come(asking, 30.0)
    assert lineup.lower(asking) == [running[1], running[2], running[4]]
    late = request(10, 2)
    lineup.come(late, 45.5)
    assert lineup.lower(late) == [running[2], running[4]]
