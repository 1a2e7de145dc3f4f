"""The admin routes: nobody without the key, every operation with it, on a tiny engine that serves meanwhile."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hicache.config import ServeConfig, Settings
from hicache.engine import Engine, SamplingParams, create_engine
from hicache.errors import ConfigError
from hicache.server import build_app
from hicache.server.admin import ENDPOINTS, Admin
from hicache.server.keys import Key
from tests.engine.tiny import settings, write_checkpoint
from tests.server.serving import serving

KEY = "open sesame"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
PROMPT = {"prompt": list(range(1, 60)), "max_tokens": 8, "temperature": 0}
LONG = {"prompt": list(range(1, 60)), "max_tokens": 150, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Engine:
    return create_engine(settings(folder, tmp_path, storage_url=f"file:{tmp_path}/store"))


@pytest.fixture
def http(engine: Engine) -> Iterator[httpx.Client]:
    with serving(build_app(engine, Admin(engine, Key(KEY)))) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def complete(http: httpx.Client, **more: Any) -> tuple[str, dict[str, int]]:
    answer = http.post("/v1/completions", json={"model": "tiny", **PROMPT, **more})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens_by_tier"]


def admin(http: httpx.Client, path: str, body: object = None) -> Any:
    answer = http.post(f"/admin/{path}", json={} if body is None else body, headers=WITH_KEY)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert KEY not in answer.text
    return error


NOTHING = {"device": 0, "host": 0, "storage": 0}


def test_s18_nothing_is_done_without_the_key(http: httpx.Client) -> None:
    complete(http)
    headers: list[Any] = [
        {},
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer \u00e9\u00ff".encode("latin-1")},
        [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer other")],
    ]
    for path in [*ENDPOINTS, "/admin", "/admin/", "/admin/nothing"]:
        for given in headers:
            for method in ("GET", "POST"):
                error = refused(http.request(method, path, headers=given, content=b"{}"), 401)
                assert error["code"] == "invalid_api_key"
    assert complete(http)[1]["device"] > 0
    assert refused(http.post("/admin/nothing", headers=WITH_KEY), 404)["code"] == "unknown_url"
    assert http.get("/health").status_code == 200


def test_s18_a_crafted_message_is_refused_and_nothing_of_it_runs(http: httpx.Client, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "owned",))

    for path in ENDPOINTS - {"/admin/stats", "/admin/audit", "/admin/storage/detach"}:
        for content in (pickle.dumps(Evil()), b"[]", b"null", b'{"unknown": 1}', b'{"force": "yes"}', b"\xff"):
            refused(http.post(path, content=content, headers=WITH_KEY | {"Content-Type": "application/json"}), 400)
    for name in ("../../x", "/etc/x", "a\0b", "x" * 300, "x" * 5000):
        refused(http.post("/admin/update_weights", json={"folder": name}, headers=WITH_KEY), 400)
        refused(http.post("/admin/storage/switch", json={"url": name}, headers=WITH_KEY), 400)
        if len(name) <= 300:
            admin(http, "flush", {"salt": name})
    assert not (tmp_path / "owned").exists()
    assert admin(http, "audit")["clean"]


def test_there_are_no_routes_without_a_key_in_the_settings(engine: Engine) -> None:
    with serving(build_app(engine)) as url:
        for path in [*ENDPOINTS, "/admin"]:
            error = refused(httpx.post(url + path, json={}, headers=WITH_KEY), 404)
            assert error["code"] == "unknown_url"


def test_s18_the_key_is_never_shown_and_the_server_is_for_this_machine() -> None:
    given = Settings(serve=ServeConfig(admin_key=KEY))
    assert given.serve.host == "127.0.0.1"
    for text in (given.describe(), repr(given), str(given.serve), repr(Key(KEY)), repr(given.serve.replace(port=1))):
        assert KEY not in text
    with pytest.raises(ConfigError, match=r"^admin_key=\*\*\*: ") as short:
        ServeConfig(admin_key="hunter2")
    assert "hunter2" not in str(short.value)


def test_s26_a_flush_over_http_counts_what_went_by_tier(http: httpx.Client) -> None:
    complete(http)
    assert complete(http)[1]["device"] > 0
    reply = admin(http, "flush")
    assert all(one["pages"] > 0 and one["bytes"] > 0 and one["left_pages"] == 0 for one in reply["cleared"].values())
    assert set(reply["cleared"]) == {"device", "host", "storage"}
    assert reply["problems"] == []
    assert complete(http)[1] == NOTHING
    assert admin(http, "flush", {"salt": "another"})["cleared"]["device"]["pages"] == 0
    assert complete(http)[1]["device"] > 0
    assert admin(http, "flush", {"salt": ""})["cleared"]["device"]["pages"] > 0
    assert complete(http)[1] == NOTHING


def test_s26_a_flush_while_a_request_runs_is_a_409_unless_forced(http: httpx.Client) -> None:
    expected, _ = complete(http, **LONG)
    admin(http, "flush")
    with http.stream("POST", "/v1/completions", json={"model": "tiny", **LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert refused(http.post("/admin/flush", json={}, headers=WITH_KEY), 409)["code"] == "in_use"
        assert admin(http, "audit")["open_matches"] == 1
        assert admin(http, "flush", {"force": True})["problems"] == []
        assert complete(http)[1] == NOTHING
        rest = "".join(lines)
    assert "[DONE]" in rest
    assert complete(http, **LONG)[0] == expected
    assert admin(http, "audit")["clean"]


def test_s26_weights_are_exchanged_over_http(http: httpx.Client, folder: Path) -> None:
    before, _ = complete(http)
    assert admin(http, "update_weights", {"folder": str(folder)})["cleared"]["device"]["pages"] > 0
    assert complete(http)[0] == before
    error = refused(http.post("/admin/update_weights", json={"folder": "/nothing"}, headers=WITH_KEY), 400)
    assert error["param"] == "folder"
    assert "/nothing" in error["message"]


def test_stores_come_and_go_over_http(http: httpx.Client, tmp_path: Path) -> None:
    answer, _ = complete(http)
    other = {"url": f"file:{tmp_path}/other", "size": "1MiB"}
    assert refused(http.post("/admin/storage/attach", json=other, headers=WITH_KEY), 409)["code"] == "in_use"
    assert admin(http, "storage/switch", other) == {"degraded": []}
    assert complete(http)[0] == answer
    assert admin(http, "storage/detach") == admin(http, "storage/detach") == {"degraded": []}
    assert complete(http)[0] == answer
    assert admin(http, "storage/attach", {"url": f"file:{tmp_path}/store"}) == {"degraded": []}
    wrong = refused(http.post("/admin/storage/switch", json={"url": "nosuch://user:secret@x/"}, headers=WITH_KEY), 400)
    assert "secret" not in wrong["message"]
    (tmp_path / "file").write_text("x")
    broken = {"url": f"file:{tmp_path}/file"}
    assert refused(http.post("/admin/storage/switch", json=broken, headers=WITH_KEY), 503)["type"] == "server_error"
    assert complete(http)[0] == answer
    assert admin(http, "audit")["clean"]


def test_stats_and_audit(http: httpx.Client) -> None:
    complete(http)
    stats = http.get("/admin/stats", headers=WITH_KEY).json()
    assert stats["engine"]["finished_requests"] <= 1
    assert {pool["tier"] for pool in stats["cache"]["pools"]} == {"device", "host"}
    found = admin(http, "audit")
    assert (found["clean"], found["open_matches"]) == (True, 0)


def test_the_routes_are_described(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()
    assert set(described["paths"]) >= ENDPOINTS
    flush = described["paths"]["/admin/flush"]["post"]
    assert set(flush["responses"]) >= {"200", "401", "409", "503"}
    assert flush["security"]
    assert "force" in described["components"]["schemas"]["FlushRequest"]["properties"]


def test_an_audit_that_finds_something_is_a_500_and_stops_the_engine(http: httpx.Client, engine: Engine) -> None:
    def steal(core: Any) -> None:
        allocator = next(iter(core.cache._device_allocators.values()))
        allocator.alloc(1)

    engine.call(steal)
    answer = httpx.post(f"{http.base_url}/admin/audit", headers=WITH_KEY)
    assert "InvariantError" in refused(answer, 500)["message"]
    assert "owned by nobody" in http.get("/health").json()["degraded"][0]
    with pytest.raises(Exception, match="stopped"):
        engine.submit([1], SamplingParams(max_tokens=1))
