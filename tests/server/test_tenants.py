"""Keys: whose a request is, what a key file may say, and that no secret is shown."""

from pathlib import Path

import httpx
import pytest

from hicache.cache import Quota
from hicache.config import ServeConfig, Settings
from hicache.errors import ConfigError
from hicache.server import build_app
from hicache.server.admin import ENDPOINTS
from hicache.server.errors import ApiError
from hicache.server.key_file import access_of, read_key_file
from hicache.server.launch import reached_at
from hicache.server.tenants import ANYONE, Keyring, grant
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

SECRET = "tell-nobody-1"
OTHER = "tell-nobody-2"
PROMPT = {"model": "org/fake", "prompt": "hello"}


def scope(*values: str) -> dict[str, object]:
    return {"path": "/v1/models", "headers": [(b"authorization", value.encode()) for value in values]}


def test_a_key_belongs_to_one_tenant() -> None:
    keyring = Keyring([grant(f"acme:{SECRET}", "here"), grant(f"acme:{OTHER}", "here"), grant("lonely-key", "here")])
    for secret in (SECRET, OTHER):
        assert keyring.tenant(scope(f"Bearer {secret}")).label == "acme"
    alone = keyring.tenant(scope("Bearer lonely-key"))
    assert alone.label == "unnamed"
    assert alone.identity not in ("", "unnamed", "acme") and ":" in alone.identity
    assert keyring.labels == ("acme", "unnamed")
    for wrong in ([], ["Bearer nobody-has-it"], [SECRET], [f"Bearer {SECRET}", f"Bearer {SECRET}"], ["Bearer "]):
        assert not keyring.opens(scope(*wrong))
        with pytest.raises(ApiError, match="needs its key"):
            keyring.tenant(scope(*wrong))


def test_without_keys_requests_are_anyones() -> None:
    assert Keyring().tenant(scope()) == ANYONE
    assert not Keyring()


def test_two_keys_without_a_name_are_two_tenants() -> None:
    one, two = (grant(key, "here").tenant.identity for key in (SECRET, OTHER))
    assert one != two


@pytest.mark.parametrize("text", ["short", "acme:short", "a b:long-enough", f":{SECRET}", "acme:has blank in it", ""])
def test_what_is_no_key_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^here: ") as refused:
        grant(text, "here")
    assert not text or text not in str(refused.value)


def test_a_key_of_two_tenants_is_refused() -> None:
    with pytest.raises(ConfigError, match="acme and other") as refused:
        Keyring([grant(f"acme:{SECRET}", "here"), grant(f"other:{SECRET}", "here")])
    assert SECRET not in str(refused.value)


def test_a_file_has_a_key_per_line_or_a_table_per_tenant(tmp_path: Path) -> None:
    lines, tables = tmp_path / "keys", tmp_path / "keys.toml"
    lines.write_text(f"# ours\n\nacme:{SECRET}\n  other:{OTHER}\n")
    tables.write_text(f'[tenants.acme]\nkeys = ["{SECRET}"]\n[tenants.other]\nkeys = ["{OTHER}"]\n')
    assert read_key_file(lines) == read_key_file(tables)
    keyring = access_of(ServeConfig(api_key_file=lines, api_key="third:another-key")).keyring
    assert keyring.labels == ("third", "acme", "other")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("keys", "hunter2"),
        ("keys", "# nothing\n"),
        ("keys.toml", "hunter2hunter2"),
        ("keys.toml", 'hunter2 = "hunter2hunter2"'),
        ("keys.toml", '[tenants.acme]\nkeys = "hunter2hunter2"'),
        ("keys.toml", '[tenants.acme]\nkeys = ["hunter2hunter2"]\nqota = 1'),
        ("keys.toml", '[tenants.acme]\nkeys = ["hunter2hunter2"]\ndevice_share = "hunter2"'),
        ("keys.toml", '[tenants.acme]\nkeys = ["hunter2hunter2"]\nhost_share = 1.5'),
        ("keys.toml", '[tenants."hunter2 x"]\nkeys = ["hunter2hunter2"]'),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_and_not_shown(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"^api_key_file={tmp_path}/{name}") as refused:
        access_of(ServeConfig(api_key_file=tmp_path / name))
    assert "hunter2" not in str(refused.value)


def test_a_file_has_quotas(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[tenants.acme]\nkeys = ["{SECRET}"]\ndevice_share = 0.25\n[tenants.other]\nkeys = ["{OTHER}"]\n')
    assert access_of(ServeConfig(api_key_file=path)).quotas == {"acme": Quota(device_share=0.25)}


def test_a_file_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        access_of(ServeConfig(api_key_file=tmp_path / "none"))


def test_the_admin_key_is_no_api_key() -> None:
    with pytest.raises(ConfigError, match="admin_key") as refused:
        access_of(ServeConfig(api_key=f"acme:{SECRET}", admin_key=SECRET))
    assert SECRET not in str(refused.value)


def test_keys_are_never_shown() -> None:
    given = Settings(serve=ServeConfig(api_key=f"acme:{SECRET}, {OTHER}"))
    assert len(given.serve.api_key) == 2
    keyring = access_of(given.serve).keyring
    shown = (given.describe(), repr(given), repr(keyring), repr(grant(SECRET, "here")))
    assert not any(secret in text for text in shown for secret in (SECRET, OTHER))


def test_who_can_reach_it_is_said() -> None:
    assert "with authentication" in "\n".join(reached_at("0.0.0.0", 80, with_keys=True))
    assert "warning" in "\n".join(reached_at("0.0.0.0", 80))


def test_s18_v1_and_metrics_are_closed_to_those_without_a_key() -> None:
    app = build_app(FakeEngine(), None, Keyring([grant(f"acme:{SECRET}", "here")]))
    good = {"Authorization": f"Bearer {SECRET}"}
    with serving(app) as url, httpx.Client(base_url=url) as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/org/fake", "/v1", "/metrics"):
            for headers in ({}, {"Authorization": f"Bearer {OTHER}"}):
                answer = http.post(path, content=b"not read", headers=headers)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert http.post("/v1/completions", json=PROMPT, headers=good).status_code == 200
        assert http.get("/v1/models", headers=good).status_code == 200
        assert http.get("/metrics", headers=good).status_code == 401
        assert http.get("/health").status_code == 200
        assert {http.post(path, headers=good).status_code for path in ENDPOINTS} == {404}
