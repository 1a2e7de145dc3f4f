"""The controller under seeded faults, against the plainest model: the bytes of a page follow from its tokens."""

import logging
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache.units import Tier
from tests.controller.driver import CHUNKS, LENGTHS, MOST_PAGES, RATES, WINDOW_RATIOS, Driver, prompt_of, step, walk
from tests.world import KINDS

CALLS = ["load", "result", "compute", "release", "retract", "retract", "restore", "restore", "restore", "discard"]
PROMPTS = st.builds(
    prompt_of, st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=7, max_size=7), st.sampled_from(LENGTHS)
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Simulated failures are not worth a log line each."""
    caplog.set_level(logging.CRITICAL, logger="hicache.transfer")


class ControllerMachine(RuleBasedStateMachine):
    """Every call of the driver is a rule; `burst` makes many of them."""

    driver: Any = None

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        rates=st.sampled_from(RATES),
        model=st.sampled_from(sorted(KINDS)),
        policy=st.sampled_from(["write_through", "write_back"]),
        device_pages=st.integers(6, 20),
        host_pages=st.integers(4, 30),
        window_ratio=st.sampled_from(WINDOW_RATIOS),
    )
    def build(self, seed, rates, model, policy, device_pages, host_pages, window_ratio) -> None:
        self.driver = Driver(seed, rates, model, policy, device_pages, host_pages, window_ratio)

    @rule(prompt=PROMPTS)
    def arrive(self, prompt) -> None:
        self.driver.arrive(prompt)

    @rule(prompt=PROMPTS, timeout_s=st.sampled_from([0.0, 5.0]))
    def prefetch(self, prompt, timeout_s) -> None:
        self.driver.prefetch(prompt, timeout_s)

    @precondition(lambda self: self.driver and self.driver.tickets)
    @rule(data=st.data(), cancel=st.booleans())
    def arrive_with_ticket(self, data, cancel) -> None:
        self.driver.arrive_with_ticket(data.draw(st.integers(0, len(self.driver.tickets) - 1)), cancel=cancel)

    @precondition(lambda self: self.driver and self.driver.requests)
    @rule(data=st.data(), call=st.sampled_from(CALLS))
    def go_on(self, data, call) -> None:
        request = data.draw(st.sampled_from(self.driver.requests))
        {
            "load": self.driver.load,
            "result": self.driver.result,
            "compute": self.driver.compute,
            "release": self.driver.release,
            "retract": self.driver.retract,
            "restore": self.driver.restore,
            "discard": self.driver.discard,
        }[call](request)

    @precondition(lambda self: self.driver and self.driver.requests)
    @rule(data=st.data(), tokens=st.sampled_from(CHUNKS), checkpoint=st.booleans(), checkpoints=st.booleans())
    def grow(self, data, tokens, checkpoint, checkpoints) -> None:
        request = data.draw(st.sampled_from(self.driver.requests))
        self.driver.go_on(request, tokens, checkpoint=checkpoint, checkpoints=checkpoints)

    @precondition(lambda self: self.driver and self.driver.requests)
    @rule(data=st.data(), tokens=st.sampled_from(CHUNKS), checkpoint=st.booleans())
    def reserve(self, data, tokens, checkpoint) -> None:
        self.driver.reserve(data.draw(st.sampled_from(self.driver.requests)), tokens, checkpoint=checkpoint)

    @precondition(lambda self: self.driver and self.driver.requests)
    @rule(data=st.data(), page=st.integers(1, MOST_PAGES))
    def drop_checkpoint(self, data, page) -> None:
        self.driver.drop_checkpoint(data.draw(st.sampled_from(self.driver.requests)), page)

    @rule()
    def poll(self) -> None:
        self.driver.poll()

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds) -> None:
        self.driver.wait(seconds)

    @rule(tier=st.sampled_from([Tier.DEVICE, Tier.HOST]), pages=st.one_of(st.none(), st.integers(0, 10)))
    def evict(self, tier, pages) -> None:
        self.driver.evict(tier, pages)

    @rule(force=st.booleans(), everything=st.booleans())
    def flush(self, force, everything) -> None:
        self.driver.flush(force=force, everything=everything)

    @rule(empty=st.booleans())
    def reattach(self, empty) -> None:
        self.driver.reattach(empty=empty)

    @rule(prompt=PROMPTS, stored=st.booleans())
    def forget_and_serve(self, prompt, stored) -> None:
        self.driver.forget_and_serve(prompt, stored=stored)

    @rule(prompt=PROMPTS, other=PROMPTS)
    def abort_in_load(self, prompt, other) -> None:
        self.driver.abort_in_load(prompt, other)

    @rule(dice=st.randoms(use_true_random=False), calls=st.integers(1, 20))
    def burst(self, dice, calls) -> None:
        for _ in range(calls):
            step(self.driver, dice)
            self.driver.check()

    @invariant()
    def sums_match_and_bytes_are_right(self) -> None:
        if self.driver is not None:
            self.driver.check()

    def teardown(self) -> None:
        if self.driver is not None:
            self.driver.finish()


TestControllerMachine = ControllerMachine.TestCase


def test_seeded_walks() -> None:
    """Thousands of calls from plain seeds: a seed that fails replays exactly."""
    for seed in range(settings.default.max_examples * 2):
        try:
            walk(seed, 60)
        except Exception as error:
            error.add_note(f"walk({seed}, 60)")
            raise
