"""The fields `cache` and `cache_salt` of a request, on both endpoints, and what each tenant has had of the cache."""

from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from hicache.engine.types import CACHED, CacheUse, SamplingParams
from hicache.server import build_app
from hicache.server.sampling import ask_of
from hicache.server.schema import ChatRequest, CompletionRequest
from hicache.server.tenants import MOST_LABELS, OTHERS, Keyring, Tenant, grant
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

ACME = Tenant("acme", "acme")
BODIES: list[tuple[type[ChatRequest | CompletionRequest], dict[str, Any]]] = [
    (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    (CompletionRequest, {"model": "m", "prompt": "x"}),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
@pytest.mark.parametrize(
    ("more", "salt", "use"),
    [
        ({}, "", CACHED),
        ({"cache": None, "cache_salt": None}, "", CACHED),
        ({"cache": {}, "cache_salt": ""}, "", CACHED),
        ({"cache": {"read": True, "write": True}, "cache_salt": "s"}, "s", CACHED),
        ({"cache": {"read": False}}, "", CacheUse(read=False)),
        ({"cache": {"write": False}}, "", CacheUse(write=False)),
        ({"cache": {"priority": -2, "ttl": 60}}, "", CacheUse(priority=-2, ttl_s=60.0)),
    ],
)
def test_what_a_body_says_reaches_the_engine(
    kind: type[ChatRequest | CompletionRequest], body: dict[str, Any], more: dict[str, Any], salt: str, use: CacheUse
) -> None:
    ask = ask_of(kind.model_validate(body | more | {"priority": 5}), [1], SamplingParams(max_tokens=1), ACME)
    assert (ask.tenant, ask.salt, ask.cache, ask.priority) == ("acme", salt, use, 5)


@pytest.mark.parametrize(("kind", "body"), BODIES)
@pytest.mark.parametrize(
    "more",
    [
        {"cache": {"read": 1}},
        {"cache": {"ttl": 0}},
        {"cache": {"ttl": "60"}},
        {"cache": {"priority": 10**6}},
        {"cache": {"reed": True}},
        {"cache": True},
        {"cache_salt": 1},
        {"cache_salt": "x" * 5000},
    ],
)
def test_what_makes_no_sense_is_refused(
    kind: type[ChatRequest | CompletionRequest], body: dict[str, Any], more: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(body | more)


def test_tokens_are_counted_per_tenant() -> None:
    engine = FakeEngine()
    with serving(build_app(engine)) as url, httpx.Client(base_url=url) as http:
        for _ in range(2):
            http.post("/v1/completions", json={"model": "org/fake", "prompt": "hello"})
        metrics = http.get("/metrics").text
    assert 'hicache_tenant_prompt_tokens_total{tenant="anyone"} 12.0' in metrics
    assert 'hicache_tenant_cached_prompt_tokens_total{tenant="anyone",tier="device"} 5.0' in metrics


def test_there_are_never_more_labels_than_so_many() -> None:
    keyring = Keyring(grant(f"tenant-{number}:secret-{number:04d}", "here") for number in range(MOST_LABELS + 20))
    assert len(keyring.labels) == MOST_LABELS + 1
    scope = {"path": "/v1", "headers": [(b"authorization", b"Bearer secret-0119")]}
    last = keyring.tenant(scope)
    assert (last.label, last.identity) == (OTHERS, "tenant-119")
