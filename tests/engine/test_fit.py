"""A request that can never fit is told at once, with need and limit; the largest that may run does run."""

import pytest

from hicache.builder import describe_model
from hicache.engine.model import CausalModel
from hicache.engine.work import CoreOptions
from hicache.errors import CapacityError
from hicache.testing.families import build_tiny
from tests.engine.bench import Bench
from tests.engine.tiny import PAGE, prompt


def test_the_largest_request_runs_and_one_token_more_is_refused(model):
    bench = Bench(model, device_pages=10, host_pages=10)
    assert bench.ask(prompt(10 * PAGE - 4), 5, ignore_eos=True).reason == "length"
    with pytest.raises(CapacityError, match=r"81 tokens.* need 11 slots of pool 'kv', which has 10"):
        bench.core.require_fit(10 * PAGE + 2)
    refused = bench.add(prompt(10 * PAGE - 4), 6)
    assert refused.reason == "error" and "which has 10" in str(refused.chunks[-1].error)
    assert (bench.core.has_work, bench.core.stats().failed_requests) == (False, 1)
    bench.settle()
    bench.idle()
    bench.core.close()


@pytest.mark.parametrize("family", ["mistral", "mamba2"])
def test_a_model_with_windows_or_states_only_is_not_limited_by_its_slots(family):
    module = build_tiny(family)
    description = describe_model(module.config, PAGE, "float32")
    (pool,) = description.pools
    window = pool.coverage.pages(PAGE) if family == "mistral" else 0
    pages = window + 3
    bench = Bench(
        CausalModel(module),
        description,
        device_pages=pages,
        host_pages=pages,
        options=CoreOptions(max_running=1, chunk_tokens=PAGE),
    )
    answer = bench.ask(prompt(3 * pages * PAGE), 5 * PAGE, ignore_eos=True)
    assert answer.reason == "length"
    if family == "mistral":
        bench.core._options = CoreOptions(max_running=1, chunk_tokens=5 * PAGE)
        with pytest.raises(CapacityError, match=rf"{window + 6} slots of pool 'swa', which has {pages}"):
            bench.core.require_fit(3 * pages * PAGE)
    bench.core.close()
