"""Requests leave and come back in any order on a host that is too small, with copies that are late or fail."""

import logging
import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from hicache.testing.simulator import FaultRates
from tests.controller.driver import CHUNKS, LENGTHS, Driver, prompt_of
from tests.world import KINDS

RATES = (FaultRates(start=0.7), FaultRates(start=0.5, fail=0.02, partial=0.02), FaultRates(start=0.5, lose=0.02))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Simulated failures are not worth a log line each."""
    caplog.set_level(logging.CRITICAL, logger="hicache.transfer")


def walk(seed: int, model: str, steps: int) -> Counter[str]:
    """A run that follows from its seed. Returns how often what happened."""
    dice = random.Random(f"{seed} {model}")
    policy = dice.choice(["write_through", "write_back"])
    driver = Driver(seed, dice.choice(RATES), model, policy, dice.randint(12, 20), dice.randint(4, 7), 1.0)
    for _ in range(steps):
        driver.arrive(prompt_of([int(dice.random() < 0.3) for _ in range(7)], dice.choice(LENGTHS)))
        request = dice.choice(driver.requests)
        calls: dict[Callable[[], None], float] = {
            partial(driver.compute, request): 3,
            partial(driver.go_on, request, dice.choice(CHUNKS), checkpoint=True, checkpoints=dice.random() < 0.5): 6,
            partial(driver.retract, request): 4,
            partial(driver.restore, request): 8,
            driver.poll: 10,
            partial(driver.release, request): 1,
            partial(driver.discard, request): 0.3,
        }
        dice.choices(list(calls), list(calls.values()))[0]()
        driver.check()
    counts = Counter(driver.cache.stats().counters)
    driver.finish()
    return counts


@pytest.mark.parametrize("model", sorted(KINDS))
def test_walks_on_a_small_host(model):
    total: Counter[str] = Counter()
    for seed in range(2):
        try:
            total += walk(seed, model, 80)
        except Exception as error:
            error.add_note(f"walk({seed}, {model!r}, 80)")
            raise
    for happened in ("backups", "restores"):
        assert total[f"retraction_{happened}"], happened
