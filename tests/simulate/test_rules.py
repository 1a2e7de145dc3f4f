"""Every rule is broken once here, and names what broke it."""

from dataclasses import replace

import pytest

from hicache.cache.stats import CacheStats, PoolStats
from hicache.engine.types import Chunk, Usage
from hicache.simulate.broken import RuleError
from hicache.simulate.content import Sight, alphabet
from hicache.simulate.requests import Asked, Requests
from hicache.simulate.rules import NO_MEMORY, check_all_answered, check_chunk, check_end, check_idle
from hicache.simulate.scenario import Workload
from hicache.simulate.tenants import Tenants
from hicache.simulate.truth import Truth
from hicache.units import Tier

TRUTH = Truth(alphabet(64), (Sight("kv", 1),))
KNOWN = TRUTH.tell([1, 2, 3, 4, 5, 6], 3)


def asked(abort_s: float | None = None) -> Asked:
    return Asked(0, KNOWN, "tenant", 0.0, abort_s)


def ended(tokens: tuple[int, ...] = KNOWN.answer, reason="length", cached: int = 0, error: str | None = None) -> Asked:
    one = asked()
    one.chunks.append(Chunk("", tokens, reason, Usage(6, len(tokens), {"device": cached}), error))
    return one


def tenants(*salts: str) -> Tenants:
    made = Tenants()
    for salt in salts:
        made.add(salt, KNOWN)
    return made


def test_right_tokens_pass_and_wrong_ones_do_not():
    one = asked()
    check_chunk(one, Chunk("", KNOWN.answer[:2]))
    wrong = ((KNOWN.answer[0] + 1) % 64,)
    with pytest.raises(RuleError, match="the model alone says"):
        check_chunk(one, Chunk("", wrong))


def test_nothing_comes_after_the_end():
    with pytest.raises(RuleError, match="after its last one"):
        check_chunk(ended(), Chunk("", ()))


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (ended(KNOWN.answer[:1]), "after 1 of 3"),
        (ended((), "abort"), "nobody asked"),
        (ended((), "error", error="TimeoutError: boom"), "boom"),
        (ended(cached=6), "6 of 6 tokens were cached"),
        (ended(cached=3), "3 of 6 tokens were cached"),
    ],
)
def test_an_end_that_can_not_be(one, said):
    with pytest.raises(RuleError, match=said):
        check_end(one, tenants("tenant", "tenant"), 2, lossy=False)


def test_an_end_that_can_be():
    check_end(ended(cached=4), tenants("tenant", "tenant"), 2, lossy=False)
    check_end(ended((), "error", error=f"TimeoutError: {NO_MEMORY} in 7 s"), tenants("tenant"), 2, lossy=True)


def test_what_only_another_tenant_asked_is_not_cached():
    with pytest.raises(RuleError, match="tenants"):
        check_end(ended(cached=4), tenants("tenant", "other"), 2, lossy=False)


def test_nobody_is_left_without_an_answer():
    check_all_answered([ended()])
    with pytest.raises(RuleError, match="without an answer"):
        check_all_answered([ended(), asked()])


POOL = PoolStats("kv", Tier.DEVICE, slots=8, slot_bytes=1, free=5, cached=3, other=0)
IDLE = CacheStats((POOL,), 0, {}, in_flight=0, open_matches=0, pins=0, counters={}, storage=None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"open_matches": 1}, "1 matches are open"),
        ({"in_flight": 2}, "2 transfers"),
        ({"pins": 1}, "1 pins"),
        ({"pools": (replace(POOL, other=1),)}, "1 of 'kv'"),
    ],
)
def test_at_rest_nothing_is_held(changes, said):
    check_idle(IDLE, 0)
    with pytest.raises(RuleError, match=said):
        check_idle(replace(IDLE, **changes), 0)


def test_what_a_lost_transfer_holds_is_forgiven():
    check_idle(replace(IDLE, in_flight=1, pins=3), 1)


def test_requests_are_drawn_alike_and_within_bounds():
    workload = Workload(stop=40, aborts=0.5)
    drawn = []
    for requests in (Requests(workload, 5, 8), Requests(workload, 5, 8)):
        bursts = []
        while not requests.ended:
            bursts.append(requests.burst())
            requests.answered(bursts[-1][0].prompt)
        drawn.append([draft for burst in bursts for draft in burst])
    assert drawn[0] == drawn[1] and len(drawn[0]) == 40
    assert all(1 <= len(draft.prompt) <= workload.prompt_tokens for draft in drawn[0])
    assert all(1 <= draft.answer_tokens <= workload.answer_tokens for draft in drawn[0])
    assert {draft.abort_after_s is None for draft in drawn[0]} == {True, False}
