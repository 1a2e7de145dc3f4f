"""What a server over any store must do: be warm after a restart, and go on answering while the store is gone."""

from pathlib import Path
from typing import Any

import httpx
import openai

from hicache.config import Settings
from hicache.server import build_app
from hicache.units import Tier
from tests.engine.tiny import PAGE, prompt, running, settings
from tests.server.fake_engine import wait_until
from tests.server.serving import serving
from tests.storage.engines import Engine

MODEL = "tiny"
PAGES = 20
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
IDS = prompt(PAGES * PAGE + 3)


def given(checkpoint: Path, folder: Path, url: str) -> Settings:
    return settings(checkpoint, folder, storage_url=url)


def answer(url: str) -> tuple[str, int]:
    """The text, and how many prompt tokens came from the store."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        created = client.completions.create(model=MODEL, prompt=IDS, **GREEDY)
    details = created.usage.to_dict()["prompt_tokens_details"]
    return created.choices[0].text, details["cached_tokens_by_tier"]["storage"]


def check_restart(config: Settings) -> str:
    """Two servers, one after the other: the second one computes nothing that the first one stored."""
    with running(config) as engine, serving(build_app(engine)) as url:
        first, stored = answer(url)
        assert stored == 0
    with running(config) as engine, serving(build_app(engine)) as url:
        assert answer(url) == (first, PAGES * PAGE)
    return first


def check_outage(config: Settings, store: Engine, expected: str) -> None:
    """A server that starts without its store answers, says so, and uses the store once it is there."""
    store.kill()
    with running(config) as engine, serving(build_app(engine)) as url:
        assert answer(url) == (expected, 0)
        told = httpx.get(f"{url}/health", timeout=60)
        assert told.status_code == 200
        assert "store" in told.text and str(store.ports[0]) in told.text
        store.start()
        engine.call(lambda core: core.cache.flush(force=True))
        assert answer(url)[0] == expected
        wait_until(lambda: "store 127" not in httpx.get(f"{url}/health", timeout=60).text)
    with running(config) as engine, serving(build_app(engine)) as url:
        assert answer(url) == (expected, PAGES * PAGE)


def check_death_and_return(config: Settings, store: Engine) -> None:
    """A store that dies under a server is left alone and found again; requests are answered all the time."""
    patient = config.replace(cache=config.cache.replace(storage_failures=2, storage_pause_s=0.2))
    with running(patient) as engine, serving(build_app(engine)) as url:

        def forgetful() -> tuple[str, int]:
            """An answer for which nothing is in memory."""
            engine.call(lambda core: [core.cache.evict(tier) for tier in (Tier.DEVICE, Tier.HOST)])
            return answer(url)

        def health() -> str:
            told = httpx.get(f"{url}/health", timeout=60)
            assert told.status_code == 200
            return told.text

        def paused() -> bool:
            assert forgetful()[0] == expected
            return "paused" in health()

        def well() -> bool:
            assert forgetful()[0] == expected
            return '"ok"' in health()

        expected, _ = answer(url)
        store.kill()
        wait_until(paused)
        assert 'hicache_storage_pauses_total{side="read"}' in httpx.get(f"{url}/metrics", timeout=60).text
        store.start()
        wait_until(well)
        wait_until(lambda: forgetful() == (expected, PAGES * PAGE))
