import tomllib
from pathlib import Path
from typing import Any

import pytest

from hicache.config import CacheConfig, ServeConfig, Settings
from hicache.errors import ConfigError


def refusal(group: type[CacheConfig | ServeConfig | Settings], **values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        group(**values)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_sizes_are_given_as_text_and_held_in_bytes():
    config = CacheConfig(device_size="2GiB", host_size="8GiB", storage_url="file:./store")
    assert (config.device_size, config.host_size) == (2 << 30, 8 << 30)


def test_settings_are_frozen_values():
    config = CacheConfig()
    with pytest.raises(Exception, match="frozen"):
        config.page_size = 32
    assert config == CacheConfig()
    assert config.page_size == 16


def test_replace_checks_again():
    assert CacheConfig().replace(page_size=32).page_size == 32
    assert Settings().replace(cache=CacheConfig(page_size=8)).cache.page_size == 8
    with pytest.raises(ConfigError, match="page_size=0"):
        CacheConfig().replace(page_size=0)


@pytest.mark.parametrize(
    ("values", "said", "right"),
    [
        ({"device_size": "50%"}, "device_size=50%: ", "2GiB"),
        ({"host_size": 0}, "host_size=0: ", "greater than 0"),
        ({"host_size": -1}, "host_size=-1: ", "from 0"),
        ({"page_size": 0}, "page_size=0: ", "greater than 0"),
        ({"page_size": "1e1"}, "page_size=1e1: ", "integer"),
        ({"host_arena": "pinned"}, "host_arena=pinned: ", "'plain', 'huge' or 'shared'"),
        ({"write_policy": "back"}, "write_policy=back: ", "write_back"),
        ({"eviction_policy": "random"}, "eviction_policy=random: ", "lru"),
        ({"transfer_timeout_s": "nan"}, "transfer_timeout_s=nan: ", "finite"),
        ({"prefetch_timeout_s": 0}, "prefetch_timeout_s=0: ", "greater than 0"),
        ({"storage_url": "./store"}, "storage_url=./store: ", "file:./store"),
        ({"storage_url": "file:x\n\ny", "page_size": "z\n"}, "page_size='z\\n': ", "integer"),
        ({"storage_size": "1GiB"}, "storage_size=1GiB: ", "set storage_url"),
        ({"storage_size": "1GiB", "storage_url": "file:./s?cap=2GiB"}, "storage_size=1GiB: ", "cap"),
        ({"pagesize": 16}, "pagesize: ", "did you mean page_size?"),
    ],
)
def test_a_cache_setting_that_cannot_be_used(values: dict[str, Any], said: str, right: str):
    message = refusal(CacheConfig, **values)
    assert message.startswith(said)
    assert right in message


@pytest.mark.parametrize(
    ("values", "said", "right"),
    [
        ({"port": 65536}, "port=65536: ", "65535"),
        ({"port": "http"}, "port=http: ", "integer"),
        ({"host": ""}, "host=: ", "at least 1 character"),
        ({"dtype": "int4"}, "dtype=int4: ", "'float32' or 'bfloat16'"),
        ({"threads": 0}, "threads=0: ", "greater than 0"),
    ],
)
def test_a_serve_setting_that_cannot_be_used(values: dict[str, Any], said: str, right: str):
    message = refusal(ServeConfig, **values)
    assert message.startswith(said)
    assert right in message


def test_a_chunk_smaller_than_a_page_is_refused():
    message = refusal(Settings, cache=CacheConfig(page_size=64), serve=ServeConfig(chunk_tokens=32))
    assert message == "chunk_tokens=32: at least page_size, which is 64"


def test_the_description_is_toml_that_gives_the_same_settings():
    settings = Settings(
        cache=CacheConfig(device_size="3MiB", storage_url="file:./store", storage_size="1536MiB"),
        serve=ServeConfig(model='a "b"', cache_folder=Path("/somewhere"), threads=3),
    )
    text = settings.describe()
    assert 'device_size = "3MiB"' in text
    assert "# max_model_len is not set" in text
    tables = tomllib.loads(text)
    assert Settings(cache=CacheConfig(**tables["cache"]), serve=ServeConfig(**tables["serve"])) == settings


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:SECRET@host:1/0",
        "redis://me:p@SECRET@host/0",
        "s3://bucket?region=x&secret_access_key=SECRET",
        "s3://bucket?sessionToken=SECRET&a=b",
        "s3://bucket?PASSWORD=SECRET",
    ],
)
def test_secrets_are_never_shown(url: str):
    config = CacheConfig(storage_url=url)
    assert config.storage_url == url
    assert "SECRET" not in config.describe() + repr(config) + str(config) + repr(Settings(cache=config))
    assert "SECRET" not in refusal(CacheConfig, storage_url=f"/{url}")


def test_the_cache_folder_follows_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ServeConfig().cache_folder == tmp_path / "hicache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ServeConfig().cache_folder == tmp_path / ".cache" / "hicache"
    assert ServeConfig(cache_folder="~/x").cache_folder == tmp_path / "x"
