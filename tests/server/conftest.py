from collections.abc import Iterator

import httpx
import openai
import pytest

from hicache.server import build_app
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving


@pytest.fixture(scope="module")
def served_engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def url(served_engine: FakeEngine) -> Iterator[str]:
    with serving(build_app(served_engine)) as base:
        yield base
    assert served_engine.closed == 1


@pytest.fixture
def engine(served_engine: FakeEngine) -> FakeEngine:
    """The engine behind `url`, as new."""
    served_engine.reset()
    return served_engine


@pytest.fixture
def http(url: str, engine: FakeEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=10) as client:
        yield client


@pytest.fixture
def client(url: str, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client
