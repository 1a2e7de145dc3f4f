"""On the default model, where it is on this machine already: it answers, and no tier changes a token."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.config import CacheConfig, ServeConfig, Settings
from hicache.engine import Engine, create_engine
from hicache.engine import default_model as source
from hicache.units import Tier
from tests.engine.tiny import ask

DOCUMENT = "".join(
    f"Note {number}: the keeper of lighthouse {number} has a dog called Rex {number}. " for number in range(90)
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    converted: Path = ServeConfig().cache_folder / "models" / source._CONVERTED_AS
    if not (converted / "config.json").is_file():
        pytest.skip("the default model has not been converted here: make demo does")
    serve = ServeConfig(model=str(converted), cache_folder=tmp_path_factory.mktemp("cache"))
    started = create_engine(Settings(cache=CacheConfig(device_size="256MiB", host_size="256MiB"), serve=serve))
    yield started
    started.close()


def encoded(engine: Engine, question: str) -> list[int]:
    turns = [{"role": "user", "content": question}]
    text = engine.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return engine.tokenizer.encode(text, add_special_tokens=False)


def test_it_answers(engine):
    tokens, last = ask(engine, encoded(engine, "What is the capital of France? Answer in one sentence."), 24)
    assert engine.tokenizer.decode(tokens, skip_special_tokens=True) == "The capital of France is Paris."
    assert last.finish_reason == "stop"
    assert engine.info.exact


@pytest.mark.full
def test_no_tier_changes_a_token(engine):
    ids = encoded(engine, DOCUMENT + "What is the dog of lighthouse 7 called?")
    cold, _ = ask(engine, ids, 12)
    device, on_device = ask(engine, ids, 12)
    while engine.call(lambda core: core.transfers_in_flight):
        pass
    engine.call(lambda core: core.cache.evict(Tier.DEVICE))
    host, on_host = ask(engine, ids, 12)
    assert cold == device == host
    full_pages = (len(ids) - 1) // 16 * 16
    assert on_device.usage is not None and on_device.usage.cached_tokens["device"] == full_pages
    assert on_host.usage is not None and on_host.usage.cached_tokens["host"] == full_pages
