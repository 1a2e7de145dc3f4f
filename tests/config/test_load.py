from pathlib import Path

import pytest

from hicache.config import Settings, load_settings, unknown_variables
from hicache.errors import ConfigError


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "hicache.toml"
    path.write_text('[cache]\npage_size = 8\nhost_size = "1GiB"\n[serve]\nport = 1111\n', encoding="utf-8")
    return path


def refusal(flags: dict[str, object], environ: dict[str, str], config_file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags, environ=environ, config_file=config_file)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_defaults():
    assert load_settings({}, environ={}) == Settings()


@pytest.mark.parametrize(
    ("flags", "environ", "from_file", "port"),
    [
        ({"port": "3333"}, {"HICACHE_SERVE_PORT": "2222"}, True, 3333),
        ({}, {"HICACHE_SERVE_PORT": "2222"}, True, 2222),
        ({}, {"HICACHE_SERVE_PORT": ""}, True, 1111),
        ({}, {}, True, 1111),
        ({"port": "3333"}, {}, False, 3333),
        ({}, {}, False, 8000),
    ],
)
def test_flags_over_environment_over_file_over_defaults(
    flags: dict[str, object], environ: dict[str, str], from_file: bool, port: int, config_file: Path
):
    settings = load_settings(flags, environ=environ, config_file=config_file if from_file else None)
    assert settings.serve.port == port
    assert settings.cache.page_size == (8 if from_file else 16)


def test_the_file_can_be_named_by_the_environment(config_file: Path, tmp_path: Path):
    environ = {"HICACHE_CONFIG": str(config_file)}
    assert load_settings({}, environ=environ).cache.host_size == 1 << 30
    other = tmp_path / "other.toml"
    other.write_text("", encoding="utf-8")
    assert load_settings({}, environ=environ, config_file=other) == Settings()


def test_the_message_names_the_setting_as_the_user_wrote_it(config_file: Path):
    assert refusal({"device_size": "50%"}, {}).startswith("--device-size=50%: ")
    assert refusal({}, {"HICACHE_DEVICE_SIZE": "50%"}).startswith("HICACHE_DEVICE_SIZE=50%: ")
    assert refusal({"storage_size": "1GiB"}, {}).startswith("--storage-size=1GiB: ")
    assert refusal({"chunk_tokens": "4"}, {}, config_file) == "--chunk-tokens=4: at least page_size, which is 8"
    config_file.write_text("[cache]\ndevice_size = '50%'", encoding="utf-8")
    assert refusal({}, {}, config_file).startswith(f"{config_file}: [cache] device_size=50%: ")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("[cache]\npagesize = 1", "[cache] pagesize: there is no such setting; did you mean page_size?"),
        ("[server]\nport = 1", "server is not a table of settings; did you mean serve?; there are [cache], [serve]"),
        ("page_size = 1", "page_size is not a table of settings; there are [cache], [serve]"),
        ("cache = 3", "cache is not a table of settings"),
        ("[cache\n", "is not valid TOML"),
        ("\udcff", "is not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_used(text: str, right: str, config_file: Path):
    config_file.write_text(text, encoding="utf-8", errors="surrogateescape")
    message = refusal({}, {}, config_file)
    assert message.startswith(f"{config_file}: ")
    assert right in message


def test_a_file_that_is_not_there(tmp_path: Path):
    assert refusal({}, {}, tmp_path / "none.toml") == (
        f"{tmp_path / 'none.toml'}: can't be read as a configuration file: No such file or directory"
    )


def test_variables_that_are_no_settings():
    environ = {"HICACHE_PORT": "tcp://10.0.0.1:80", "HICACHE_PAGE_SIZE": "8", "HICACHE_CONFIG": "x", "HOME": "/"}
    assert unknown_variables(environ) == ("HICACHE_PORT",)
