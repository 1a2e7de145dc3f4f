"""What is promised to a tenant stays in every tier, whoever needs room; who can't fit beside it is told at once."""

from pathlib import Path

import pytest

from hicache.cache import Quota
from hicache.engine import Engine, SamplingParams
from hicache.engine.core import EngineCore
from hicache.engine.types import Ask
from hicache.errors import CapacityError, ConfigError
from hicache.units import Tier
from tests.engine.tiny import PAGE, collect, prompt, running, settings, write_checkpoint
from tests.server.fake_engine import wait_until

A, B = Quota(device_share=0.3, host_share=0.3), Quota(device_share=0.2, host_share=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def ask(engine: Engine, tenant: str, length: int, seed: int) -> dict[str, int]:
    (stream,) = engine.submit_all([Ask(prompt(length, seed), SamplingParams(max_tokens=1), tenant=tenant)])
    last = collect(stream)[1]
    assert last.usage is not None and last.error is None
    return dict(last.usage.cached_tokens)


def held(engine: Engine, tier: Tier) -> dict[str, int]:
    """Pages per tenant, after an audit."""
    engine.audit()
    owned = engine.call(lambda core: core.cache.controller.state.tree.owned())
    return {tenant: tiers[tier]["kv"] for tenant, tiers in owned.items()}


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_flood_leaves_what_is_promised_to_others(folder: Path, tmp_path: Path, policy: str) -> None:
    with running(settings(folder, tmp_path, write_policy=policy)) as engine:
        engine.set_quotas({"a": A, "b": B})
        assert ask(engine, "a", 50 * PAGE + 1, 1)["device"] == 0
        assert held(engine, Tier.DEVICE)["a"] == 50
        for seed in range(2, 16):
            ask(engine, "flood", 60 * PAGE + 1, seed)
            ask(engine, "b", 30 * PAGE + 1, seed)
            assert held(engine, Tier.DEVICE)["a"] == 50
        assert ask(engine, "a", 50 * PAGE + 1, 1)["device"] == 50 * PAGE
        assert held(engine, Tier.DEVICE)["b"] >= 40
        stats = engine.call(lambda core: core.cache.stats())
        assert set(stats.tenant_bytes) == {"", "a", "b"}
        assert sum(tiers[Tier.DEVICE] for tiers in stats.tenant_bytes.values()) == sum(
            pool.cached * pool.slot_bytes for pool in stats.pools if pool.tier is Tier.DEVICE
        )


def test_without_quotas_the_flood_takes_all(folder: Path, tmp_path: Path) -> None:
    with running(settings(folder, tmp_path)) as engine:
        ask(engine, "a", 50 * PAGE + 1, 1)
        for seed in range(2, 8):
            ask(engine, "flood", 60 * PAGE + 1, seed)
        assert ask(engine, "a", 50 * PAGE + 1, 1)["device"] == 0


def test_who_does_not_fit_beside_what_is_promised_is_told_at_once(folder: Path, tmp_path: Path) -> None:
    with running(settings(folder, tmp_path)) as engine:
        engine.set_quotas({"a": Quota(device_share=0.9)})
        engine.check(Ask(prompt(100 * PAGE), SamplingParams(max_tokens=1), tenant="a"))
        with pytest.raises(CapacityError, match="promised to other tenants"):
            engine.check(Ask(prompt(100 * PAGE), SamplingParams(max_tokens=1), tenant="b"))
        with pytest.raises(ConfigError, match="set once"):
            engine.set_quotas({"a": A})


def test_quotas_leave_something_and_come_first(folder: Path, tmp_path: Path) -> None:
    with running(settings(folder, tmp_path)) as engine:
        with pytest.raises(ConfigError, match="promise 1 of the host tier"):
            engine.set_quotas({"a": Quota(host_share=0.7), "b": Quota(host_share=0.3)})
        with pytest.raises(ConfigError, match="at most 100"):
            engine.set_quotas({str(number): Quota() for number in range(101)})
        ask(engine, "a", 20, 1)
        with pytest.raises(ConfigError, match="before the first request"):
            engine.set_quotas({"a": A})
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="host_share"):
            Quota(host_share=wrong)


def test_no_request_gets_slots_that_are_promised_to_others(folder: Path, tmp_path: Path) -> None:
    def try_all(core: EngineCore) -> tuple[int, bool, bool]:
        cache, other = core.cache, engine.info.namespace.with_tenant("other")
        match = cache.match_prefix(prompt(8, 5), other)
        room = cache.room(other)["kv"]
        refused = cache.allocate(match, (room + 1) * PAGE) is None
        granted = cache.allocate(match, room * PAGE) is not None
        cache.release(match)
        return room, refused, granted

    with running(settings(folder, tmp_path)) as engine:
        engine.set_quotas({"a": A, "b": B})
        ask(engine, "a", 50 * PAGE + 1, 1)
        ask(engine, "b", 50 * PAGE + 1, 1)
        wait_until(lambda: engine.call(lambda core: core.cache.in_flight) == 0)
        slots = engine.call(lambda core: core.cache.room())["kv"]
        assert engine.call(try_all) == (slots - 50 - 40, True, True)
        assert held(engine, Tier.DEVICE) == {"": 0, "a": 50, "b": 40}
