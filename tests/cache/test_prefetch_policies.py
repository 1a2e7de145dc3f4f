"""A policy says how long a request waits for storage; a deadline always holds, and nothing is published early."""

import pytest

from hicache.errors import ConfigError
from hicache.transfer import Fetch, Query
from hicache.units import Tier
from tests.cache.test_prefetch import PROMPT, finishes, stored
from tests.world import PAGE


def asks(policy: str, timeout_s: float | None = None, **settings):
    world, hand, _ = stored(settings={"prefetch_policy": policy, **settings})
    ticket = world.cache.prefetch(PROMPT, world.namespace, timeout_s)
    return world, hand, ticket


def at(world, now_s: float) -> None:
    world.clock.now_s = now_s
    world.cache.poll()


def test_best_effort_keeps_no_request_waiting_and_goes_on_behind_it():
    world, hand, ticket = asks("best_effort")
    assert ticket.done
    assert not ticket.ended
    hand.run(Query)
    world.cache.poll()
    hand.run(Fetch, count=1)
    world.cache.poll()
    assert world.cached(PROMPT) == (0, 2 * PAGE), "what has come by now is used"
    match = world.cache.match_prefix(PROMPT, world.namespace, ticket)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    assert ticket.ended
    assert world.cached(PROMPT) == (0, 6 * PAGE), "and the rest is there for the next"
    world.idle()


def test_wait_complete_waits_beyond_the_time_of_others_and_not_beyond_the_limit():
    world, hand, ticket = asks("wait_complete", prefetch_timeout_s=1.0, prefetch_limit_s=9.0)
    hand.run(Query)
    at(world, 8.9)
    assert not ticket.done
    at(world, 9.0)
    assert ticket.done
    hand.settle(world.cache.poll)
    world.idle()


def test_the_time_of_a_long_prompt_is_longer():
    world, _, ticket = asks("timeout", prefetch_timeout_s=1.0, prefetch_page_timeout_s=0.5)
    at(world, 3.9)
    assert not ticket.done
    at(world, 4.0)
    assert ticket.done


@pytest.mark.parametrize("policy", ["wait_complete", "timeout", "cost-aware"])
def test_a_time_given_with_the_call_holds_under_every_policy(policy):
    world, _, ticket = asks(policy, timeout_s=0.25)
    at(world, 0.24)
    assert not ticket.done
    at(world, 0.25)
    assert ticket.done


def test_a_policy_given_with_the_call_goes_before_the_setting():
    world, _, _ = stored()
    assert not world.cache.prefetch(PROMPT, world.namespace).done
    assert world.cache.prefetch(PROMPT, world.namespace, policy="best_effort").done


def measured(bytes_per_s: float, tokens_per_s: float):
    """A cost-aware world that has seen its store fetch at a rate, whose engine computes at another."""
    world, hand, ticket = asks("cost-aware")
    hand.run(Query)
    world.cache.poll()
    size_bytes = world.cache.controller.state.size_bytes({"kv": 6})
    hand.run(Fetch)
    at(world, size_bytes / bytes_per_s)
    assert ticket.done
    assert world.cached(PROMPT) == (0, 6 * PAGE)
    world.cache.evict(Tier.HOST)
    assert world.cached(PROMPT) == (0, 0)
    world.cache.tell_compute_rate(tokens_per_s)
    return world, hand, size_bytes


@pytest.mark.parametrize(("share", "fetched"), [(0.99, 0), (1.01, 6)])
def test_storage_is_left_behind_where_computing_is_quicker(share, fetched):
    """All in one second by the store; by the engine in a little less, or a little more."""
    world, hand, size_bytes = measured(100.0, 1.0)
    seconds = size_bytes / 100.0
    world.cache.tell_compute_rate(6 * PAGE / (seconds * share))
    before = world.cache.stats().counters["fetch_pages"]
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    hand.run(Query)
    world.cache.poll()
    assert ticket.done is (fetched == 0)
    hand.settle(world.cache.poll)
    counters = world.cache.stats().counters
    assert counters["fetch_pages"] - before == fetched
    assert counters["prefetch_left"] == (fetched == 0)
    assert finishes(world, hand, ticket)["storage"] == fetched * PAGE


def test_a_store_that_gets_slow_is_waited_for_as_long_as_computing_takes():
    world, hand, size_bytes = measured(100.0, 1.0)
    seconds = size_bytes / 100.0
    world.cache.tell_compute_rate(6 * PAGE / (2 * seconds))
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    hand.run(Query)
    world.cache.poll()
    begun_s = world.clock.now_s
    at(world, begun_s + 1.9 * seconds)
    assert not ticket.done
    at(world, begun_s + 2.0 * seconds + 1e-9)
    assert ticket.done
    assert world.cached(PROMPT) == (0, 0), "nothing is published before it has come"
    hand.settle(world.cache.poll)
    world.idle()


def test_what_others_wait_for_counts():
    """Computing takes one and a half times as long as fetching one prompt, and not as long as fetching two."""
    world, hand, size_bytes = measured(100.0, 1.0)
    world.cache.tell_compute_rate(6 * PAGE / (1.5 * size_bytes / 100.0))
    first = world.cache.prefetch(PROMPT, world.namespace)
    second = world.cache.prefetch(PROMPT, world.namespace)
    hand.run(Query)
    world.cache.poll()
    assert not first.done
    assert second.done
    assert world.cache.stats().counters["prefetch_left"] == 1
    hand.settle(world.cache.poll)
    world.idle()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    world, _, _ = stored()
    with pytest.raises(ConfigError, match="above 0"):
        world.cache.tell_compute_rate(rate)
