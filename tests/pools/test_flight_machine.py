"""Windows, checkpoints, derived pools and drafts with transfers in flight: every slot one owner, every byte right."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.pools.flight_driver import STEPS, FlightDriver, walk

seeds = st.integers(0, 2**32 - 1)


class FlightMachine(RuleBasedStateMachine):
    """Every step of the driver is a rule; `burst` makes many of them."""

    driver: FlightDriver | None = None

    @initialize(seed=seeds)
    def build(self, seed: int) -> None:
        self.driver = FlightDriver(seed)

    @rule(step=st.sampled_from(list(STEPS)), seed=seeds)
    def step(self, step, seed: int) -> None:
        assert self.driver is not None
        step(self.driver, seed)
        self.driver.check()

    @rule(seed=seeds, steps=st.integers(1, 8))
    def burst(self, seed: int, steps: int) -> None:
        assert self.driver is not None
        walk(self.driver, seed, steps)

    def teardown(self) -> None:
        if self.driver is not None:
            self.driver.close()


TestFlightMachine = FlightMachine.TestCase


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_long_walks(seed: int) -> None:
    driver = FlightDriver(seed)
    walk(driver, seed, 2000)
    driver.close()
