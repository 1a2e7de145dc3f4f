"""S40 through the server: what one tenant has cached is nobody else's, in every tier and after a restart."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hicache.engine import Engine, create_engine
from hicache.server import build_app
from hicache.server.tenants import Keyring, grant
from tests.engine.tiny import settings, write_checkpoint
from tests.server.fake_engine import wait_until
from tests.server.serving import serving

A, B, C = "key-of-tenant-a", "key-of-tenant-b", "key-of-tenant-c"
PROMPT = {"model": "tiny", "prompt": list(range(1, 60)), "max_tokens": 4, "temperature": 0}
NOTHING = {"device": 0, "host": 0, "storage": 0}
OTHERS = [(B, "salt"), (B, "other"), (B, ""), (B, None), (A, "other"), (A, ""), (A, None), (C, "salt"), (C, None)]
"""Who asks, and with which salt, after A has asked with `salt`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def server(folder: Path, home: Path) -> Iterator[tuple[Engine, httpx.Client]]:
    engine = create_engine(settings(folder, home, storage_url=f"file:{home}/store"))
    keyring = Keyring([grant(f"a:{A}", "here"), grant(f"ab:{B}", "here"), grant(C, "here")])
    with serving(build_app(engine, None, keyring)) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield engine, http


def cached(http: httpx.Client, key: str, salt: str | None, **more: Any) -> dict[str, int]:
    salted = {} if salt is None else {"cache_salt": salt}
    headers = {"Authorization": f"Bearer {key}"}
    answer = http.post("/v1/completions", json={**PROMPT, **salted, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    tiers: dict[str, int] = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return tiers


def stored(engine: Engine) -> None:
    """Waits until all that was computed is in the store."""
    wait_until(lambda: engine.call(lambda core: core.cache.in_flight) == 0)


@pytest.mark.parametrize("restart", [False, True])
def test_s40_nobody_else_gets_what_a_tenant_has_cached(folder: Path, tmp_path: Path, restart: bool) -> None:
    with server(folder, tmp_path) as (engine, http):
        assert cached(http, A, "salt") == NOTHING
        assert cached(http, A, "salt")["device"] == 56
        stored(engine)
        if not restart:
            for key, salt in OTHERS:
                if (key, salt) not in ((B, None), (A, None)):  # an empty salt is none: these come second
                    assert cached(http, key, salt) == NOTHING, (key, salt)
            assert cached(http, A, "salt")["device"] == 56
    if restart:
        for key, salt in OTHERS:
            with server(folder, tmp_path) as (engine, http):
                expected = (key, salt) in ((B, None), (A, None))
                assert (cached(http, key, salt)["storage"] > 0) == expected, (key, salt)
                stored(engine)
        with server(folder, tmp_path) as (engine, http):
            assert cached(http, A, "salt")["storage"] == 56


def test_s40_an_empty_salt_is_none_and_where_tenant_and_salt_meet_does_not_matter(folder: Path, tmp_path: Path) -> None:
    with server(folder, tmp_path) as (_, http):
        assert cached(http, A, "bc") == NOTHING
        assert cached(http, B, "c") == NOTHING  # "a" with "bc", "ab" with "c"
        assert cached(http, A, None) == NOTHING
        assert cached(http, A, "")["device"] == 56


def test_s40_what_is_asked_of_the_tiers_does_not_depend_on_what_others_have(folder: Path, tmp_path: Path) -> None:
    """Not a time, which would be noise, but all that it could follow from: the keys that are looked up."""

    def asked(home: Path, *, primed: bool) -> list[tuple[bytes, ...]]:
        with server(folder, home) as (engine, http):
            if primed:
                cached(http, A, "salt")
                stored(engine)
            seen: list[tuple[bytes, ...]] = []

            def watch(core: Any) -> None:
                store = core.cache.controller.storage
                contains = store.contains

                def watched(keys: Any) -> Any:
                    seen.append(tuple(key.page for key in keys))
                    return contains(keys)

                store.contains = watched

            engine.call(watch)
            cached(http, B, "salt")
            return seen

    alone, beside = asked(tmp_path / "alone", primed=False), asked(tmp_path / "beside", primed=True)
    assert alone == beside
    assert alone
