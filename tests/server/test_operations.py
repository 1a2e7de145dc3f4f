"""Health, metrics and the list of models."""

from typing import Any

import httpx
import pytest

from hicache.controller.counters import Counters
from hicache.server.engine_metrics import FAILURES
from tests.server.fake_engine import FakeEngine

MODEL = "org/fake"
PROMPT = {"model": MODEL, "prompt": "hello"}


COUNTS = {
    "hicache_prompt_tokens_total": 12,
    'hicache_cached_prompt_tokens_total{tier="device"}': 5,
    'hicache_cached_prompt_tokens_total{tier="host"}': 0,
    'hicache_cached_prompt_tokens_total{tier="storage"}': 0,
    "hicache_completion_tokens_total": 10,
    "hicache_time_to_first_token_seconds_count": 2,
    'hicache_time_to_first_token_seconds_bucket{le="0.01"}': 0,
    'hicache_time_to_first_token_seconds_bucket{le="0.025"}': 2,
}


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next((line for line in lines if line.startswith(name + " ")), "0").split()[-1])


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    card = client.models.retrieve(MODEL).to_dict()
    assert (card["object"], card["max_model_len"]) == ("model", 200)


def test_health_lists_what_is_degraded(http: httpx.Client, engine: FakeEngine) -> None:
    assert http.get("/health").json() == {"status": "ok", "degraded": []}
    engine.degraded = ("storage: disk full",)
    response = http.get("/health")
    assert response.status_code == 200
    assert response.json() == {"status": "degraded", "degraded": ["storage: disk full"]}


def test_health_fails_once_the_engine_has_stopped(http: httpx.Client, engine: FakeEngine) -> None:
    engine.alive = False
    engine.degraded = ("the engine has stopped: a bug",)
    response = http.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "stopped", "degraded": ["the engine has stopped: a bug"]}


def test_metrics_count_tokens_by_tier_with_their_denominator(http: httpx.Client) -> None:
    before = {name: metric(http, name) for name in COUNTS}
    http.post("/v1/completions", json=PROMPT)
    http.post("/v1/completions", json=PROMPT)
    assert {name: metric(http, name) - before[name] for name in COUNTS} == COUNTS


def test_metrics_count_requests_by_status(http: httpx.Client) -> None:
    names = [
        'hicache_requests_total{endpoint="/v1/completions",status="200"}',
        'hicache_requests_total{endpoint="/v1/completions",status="400"}',
        'hicache_requests_total{endpoint="other",status="404"}',
    ]
    before = [metric(http, name) for name in names]
    http.post("/v1/completions", json=PROMPT)
    http.post("/v1/completions", json={})
    http.get("/v1/" + "x" * 50)
    assert [metric(http, name) - old for name, old in zip(names, before, strict=True)] == [1, 1, 1]
    assert metric(http, "hicache_requests_running") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ('hicache_pool_slots{pool="kv",state="free",tier="device"}', 5),
        ('hicache_pool_slots{pool="kv",state="cached",tier="device"}', 3),
        ('hicache_pool_slots{pool="kv",state="busy",tier="device"}', 2),
        ('hicache_pool_slots{pool="kv",state="free",tier="host"}', 20),
        ('hicache_pool_slot_bytes{pool="kv",tier="host"}', 64),
        ('hicache_pool_reclaims_total{pool="kv",tier="host"}', 48),
        ('hicache_pool_reclaimed_slots_total{pool="kv",tier="host"}', 49),
        ('hicache_pool_refusals_total{pool="kv",tier="host"}', 50),
        ('hicache_pool_rollbacks_total{pool="kv",tier="host"}', 51),
        ('hicache_reservations_total{tier="device"}', 52),
        ('hicache_reservations_total{tier="host"}', 53),
        ("hicache_cache_lookup_tokens_total", 100),
        ('hicache_cache_hit_tokens_total{tier="device"}', 40),
        ('hicache_cache_hit_tokens_total{tier="storage"}', 0),
        ("hicache_transfers_in_flight", 4),
        ("hicache_open_matches", 2),
        ("hicache_pins", 6),
        ("hicache_cache_kv_hit_without_state_tokens_total", 12),
        ('hicache_failures_total{kind="load_failed"}', 1),
        ('hicache_failures_total{kind="dropped_pages"}', 0),
        ('hicache_cache_work_total{kind="load_pages"}', 9),
        ("hicache_storage_attached", 1),
        ('hicache_storage_pages_total{outcome="read"}', 11),
        ('hicache_storage_pages_total{outcome="damaged"}', 1),
        ('hicache_storage_bytes_total{direction="read"}', 704),
        ("hicache_degraded", 2),
        ("hicache_engine_steps_total", 31),
        ('hicache_engine_tokens_total{phase="prefill"}', 32),
        ('hicache_engine_tokens_total{phase="decode"}', 33),
        ("hicache_engine_preemptions_total", 34),
        ("hicache_engine_retractions_total", 46),
        ("hicache_engine_drafted_tokens_total", 45),
        ("hicache_engine_accepted_tokens_total", 44),
        ('hicache_failures_total{kind="void_steps"}', 35),
        ('hicache_failures_total{kind="failed_requests"}', 36),
        ('hicache_engine_requests{state="running"}', 37),
        ('hicache_engine_requests{state="waiting"}', 38),
        ('hicache_engine_requests{state="retracted"}', 47),
        ("hicache_engine_queued_requests", 48),
        ("hicache_engine_refused_requests_total", 49),
    ],
)
def test_metrics_show_what_the_cache_knows(http: httpx.Client, engine: FakeEngine, name: str, value: float) -> None:
    engine.degraded = ("one", "two")
    lines = http.get("/metrics").text.splitlines()
    assert f"{name} {float(value)}" in lines


def test_every_failure_that_the_cache_counts_is_known_by_name() -> None:
    names = Counters().snapshot()
    assert set(names) >= FAILURES
    assert {name for name in names if "failed" in name or "refused" in name} <= FAILURES
