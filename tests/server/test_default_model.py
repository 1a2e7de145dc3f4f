"""The default model, where an earlier run has converted it: it answers, stops by itself, and its prompt is cached."""

from pathlib import Path
from typing import Any

import openai
import pytest

from hicache.config import CacheConfig, ServeConfig, Settings
from hicache.server import build_app
from tests.engine.tiny import running
from tests.server.serving import serving

CONVERTED = sorted((ServeConfig().cache_folder / "models").glob("smollm2*/config.json"))


@pytest.mark.skipif(not CONVERTED, reason="the default model is not on this machine; hicache demo fetches it")
def test_answers_and_caches(tmp_path: Path) -> None:
    folder = CONVERTED[-1].parent
    settings = Settings(
        cache=CacheConfig(device_size=64 << 20, host_size=64 << 20),
        serve=ServeConfig(model=str(folder), cache_folder=tmp_path),
    )
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    with running(settings) as engine, serving(build_app(engine)) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            first, second = (
                client.chat.completions.create(model=folder.name, messages=question, temperature=0, max_tokens=30)
                for _ in range(2)
            )
        engine.call(lambda core: core.cache.audit())
    for answer in (first, second):
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content == first.choices[0].message.content
    assert first.usage is not None and second.usage is not None
    assert second.usage.to_dict()["prompt_tokens_details"] == {
        "cached_tokens": (first.usage.prompt_tokens - 1) // 16 * 16,
        "cached_tokens_by_tier": {"device": (first.usage.prompt_tokens - 1) // 16 * 16, "host": 0, "storage": 0},
    }
