"""A machine that is stated gives virtual seconds; what is slower or smaller there is slower here."""

import pytest

from hicache.config import CacheConfig
from hicache.errors import ConfigError
from hicache.simulate.plan import plan
from hicache.simulate.report import Report
from hicache.simulate.scenario import Hardware, Workload
from hicache.simulate.shapes import Shape
from hicache.simulate.world import run_scenario

WORKLOAD = Workload(
    gap_s=0.02, burst=1, prompt_tokens=200, answer_tokens=20, aborts=0.0, evictions=0.0, most_open=1000, stop=40
)


def run(shape: str = "full", *, storage: bool = False, token_bytes: int = 1 << 16, **settings) -> Report:
    sizes = {"device_size": "64MiB", "host_size": "128MiB"}
    config = CacheConfig(**{**sizes, **settings})
    scenario = plan(
        0, 1 << 30, Shape(shape, 32), config, Hardware(), WORKLOAD, token_bytes=token_bytes, storage=storage
    )
    return run_scenario(scenario)


def test_every_request_is_answered_in_virtual_time():
    report = run()
    assert report.requests == {"length": 40}
    assert 0 < report.ttft_p50_s <= report.ttft_p95_s < report.virtual_s
    assert report.tokens_per_s == (report.prompt_tokens + report.answer_tokens) / report.virtual_s
    assert report.prefilled_tokens + sum(report.hits.values()) == report.prompt_tokens
    assert report.hits["device"] > 0 and report.faults == report.lost == 0


def test_bytes_are_those_of_the_machine():
    report = run(token_bytes=1 << 16)
    assert report.moved_bytes["backup"] % (16 << 16) == 0
    assert report.moved_bytes["backup"] >= report.prefilled_tokens // 16 * (16 << 16) // 2


def test_a_smaller_device_hits_less_and_a_host_makes_up_for_it():
    large, small = run(device_size="256MiB"), run(device_size="20MiB", host_size="256MiB")
    assert small.hits["device"] < large.hits["device"]
    assert small.hits["host"] > large.hits["host"]


@pytest.mark.parametrize("shape", ["window", "state", "latent", "full+window", "full+state", "all"])
def test_every_shape_can_be_stated(shape):
    assert run(shape, storage=True, storage_url="memory:").requests == {"length": 40}


def test_a_device_that_holds_less_than_a_request_is_refused():
    with pytest.raises(ConfigError, match="one request of this workload needs"):
        run(device_size="12MiB")
