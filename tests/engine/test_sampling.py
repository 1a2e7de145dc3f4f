"""Greedy, temperature, top_k, top_p, min_p and seeds against a plain reading of what each means."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.engine.sampling import Sampler, distribution
from hicache.engine.types import SamplingParams
from hicache.errors import ConfigError


def params(**changes) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1, "temperature": 1.0} | changes))


def softmax(logits, temperature):
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40).map(lambda x: np.array(x, np.float32))


def test_greedy_takes_the_likeliest_and_of_equals_the_first():
    assert Sampler(params(temperature=0.0)).choose(np.array([0, 3, 3, 1], np.float32), 0) == 1


@given(LOGITS, st.floats(0.1, 4), st.integers(0, 45), st.floats(0.05, 1), st.floats(0, 1))
def test_a_filter_keeps_what_its_definition_says(logits, temperature, top_k, top_p, min_p):
    tokens, probabilities = distribution(logits, params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = order[:top_k] if top_k else order
    share = softmax(logits[kept], temperature)
    if top_p < 1:
        kept = [token for i, token in enumerate(kept) if i == 0 or share[:i].sum() < top_p - 1e-12]
    share = dict(zip(kept, share, strict=False))
    sure = {token for token in kept if share[token] > min_p * share[order[0]] * (1 + 1e-9)} | {order[0]}
    possible = {token for token in kept if share[token] >= min_p * share[order[0]] * (1 - 1e-9)}
    near_edge = {order[len(kept)]} if len(kept) < len(order) else set()
    assert sure <= set(tokens.tolist()) | near_edge
    assert set(tokens.tolist()) <= possible | near_edge | {order[0]}
    assert probabilities.sum() <= 1 + 1e-9
    for token, probability in zip(tokens.tolist(), probabilities, strict=True):
        if token in share:
            assert probability == pytest.approx(share[token], rel=1e-9)


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler = Sampler(params(seed=5))
    counts = np.bincount([sampler.choose(logits, position) for position in range(4000)], minlength=4) / 4000
    assert np.abs(counts - [0.5, 0.3, 0.15, 0.05]).max() < 0.03


def test_a_low_temperature_is_nearly_greedy_and_a_tiny_one_does_not_overflow():
    logits = np.array([1, 2, 80], np.float32)
    assert {Sampler(params(seed=1, temperature=1e-300)).choose(logits, i) for i in range(20)} == {2}


def test_a_draw_depends_on_seed_and_position_alone():
    logits = np.zeros(1000, np.float32)
    one, other = Sampler(params(seed=3)), Sampler(params(seed=3))
    expected = [one.choose(logits, position) for position in range(10)]
    assert [other.choose(logits, position) for position in reversed(range(10))] == expected[::-1]
    assert [Sampler(params(seed=4)).choose(logits, position) for position in range(10)] != expected
    assert len(set(expected)) > 5


def test_without_a_seed_two_requests_differ():
    logits = np.zeros(10_000, np.float32)
    one, other = Sampler(params()), Sampler(params())
    assert [one.choose(logits, i) for i in range(4)] != [other.choose(logits, i) for i in range(4)]


def test_minus_infinity_is_never_drawn():
    logits = np.array([-np.inf, 0, -np.inf, 0], np.float32)
    assert {Sampler(params(seed=2, top_p=0.99)).choose(logits, i) for i in range(50)} == {1, 3}


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2.0},
        {"stop": ("",)},
    ],
)
def test_a_value_out_of_range_is_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        params(**wrong)
