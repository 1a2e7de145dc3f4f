"""What a request says about cached pages holds, for every kind of state: compute all, leave nothing, stay longer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.engine import Engine, SamplingParams
from hicache.engine.types import Ask, CacheUse
from hicache.errors import CapacityError, ConfigError
from hicache.units import Tier
from tests.engine.tiny import collect, prompt, running, settings, write_checkpoint

FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 24}}
NOTHING = {"device": 0, "host": 0, "storage": 0}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", request.param, **FAMILIES[request.param])


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    given = settings(folder, tmp_path, storage_url=f"file:{tmp_path}/store", eviction_policy="priority")
    with running(given) as engine:
        yield engine


def ask(engine: Engine, use: CacheUse, length: int = 60) -> tuple[list[int], dict[str, int]]:
    (stream,) = engine.submit_all([Ask(prompt(length), SamplingParams(max_tokens=40, ignore_eos=True), cache=use)])
    tokens, last = collect(stream)
    assert last.usage is not None, last.error
    return tokens, dict(last.usage.cached_tokens)


def held(engine: Engine) -> tuple[list[int], int]:
    """Cached slots per pool and tier, and pages written to the store, once nothing is under way."""
    while engine.call(lambda core: core.cache.in_flight):
        pass
    stats = engine.call(lambda core: core.cache.stats())
    assert stats.storage is not None
    assert all(pool.other == 0 for pool in stats.pools)
    return [pool.cached for pool in stats.pools], stats.storage.written_pages


def test_without_write_nothing_is_left_in_any_tier(engine: Engine) -> None:
    tokens, cached = ask(engine, CacheUse(write=False))
    assert cached == NOTHING
    cached_slots, written = held(engine)
    assert (set(cached_slots), written) == ({0}, 0)
    assert ask(engine, CacheUse()) == (tokens, NOTHING)
    before = held(engine)
    again, cached = ask(engine, CacheUse(write=False), 60)
    assert (again, cached["device"] > 0) == (tokens, True)
    ask(engine, CacheUse(write=False), 90)
    assert held(engine) == before


def test_without_read_everything_is_computed(engine: Engine) -> None:
    tokens, _ = ask(engine, CacheUse())
    before = held(engine)
    computed = engine.call(lambda core: core.stats().prefill_tokens)
    assert ask(engine, CacheUse(read=False)) == (tokens, NOTHING)
    assert engine.call(lambda core: core.stats().prefill_tokens) == computed + 60
    assert held(engine) == before
    assert ask(engine, CacheUse(read=False, write=False)) == (tokens, NOTHING)
    assert ask(engine, CacheUse())[1]["device"] > 0


def test_priority_and_time_to_live_reach_the_pages(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watch(core: Any) -> None:
        match_prefix = core.cache.match_prefix

        def watched(*arguments: Any, **more: Any) -> Any:
            seen.append((more["priority"], more["ttl_s"]))
            return match_prefix(*arguments, **more)

        monkeypatch.setattr(core.cache, "match_prefix", watched)

    engine.call(watch)
    ask(engine, CacheUse(priority=3, ttl_s=60.0))
    params = SamplingParams(max_tokens=1)
    for given in (Ask(prompt(20), params, priority=2), Ask(prompt(20), params, priority=2, cache=CacheUse(priority=0))):
        collect(engine.submit_all([given])[0])
    assert seen[0] == (3, 60.0)
    assert [one for one in seen if one != (3, 60.0)] == [(2, None), (0, None)]


@pytest.mark.parametrize(
    "wrong", [{"ttl_s": 0.0}, {"ttl_s": float("nan")}, {"ttl_s": float("inf")}, {"priority": 10**6}]
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^cache\."):
        CacheUse(**wrong)


def test_pages_that_are_not_shared_must_fit_whole(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", "gemma3_text", layer_types=LAYERS, sliding_window=16)
    with running(settings(folder, tmp_path, window_ratio=0.1, max_model_len=1000)) as engine:
        params = SamplingParams(max_tokens=1)
        long = Ask(prompt(900), params)
        engine.check(long)
        with pytest.raises(CapacityError, match="swa"):
            engine.check(Ask(long.prompt_ids, params, cache=CacheUse(write=False)))
        assert engine.call(lambda core: core.cache.taken_slots("swa", Tier.DEVICE)).size == 0


LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
