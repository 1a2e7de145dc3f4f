"""What a key file says is what holds: every line is understood, or the server does not start; no key is shown."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hicache.config import ServeConfig
from hicache.errors import ConfigError
from hicache.server.tenants import Grant, Keyring, from_lines, grant, grant_to, require_name

_FIELDS = ("keys",)


def keyring_of(serve: ServeConfig) -> Keyring:
    """The keys of the settings and of the file that they name. Raises ConfigError for what is no key."""
    grants = [grant(secret.get_secret_value(), "api_key") for secret in serve.api_key]
    if serve.api_key_file is not None:
        found = list(read_grants(serve.api_key_file))
        if not found:
            raise ConfigError(f"api_key_file={serve.api_key_file}: it has no keys; write TENANT:KEY, one a line")
        grants += found
    keyring = Keyring(grants)
    if serve.admin_key is not None and keyring.knows(serve.admin_key.get_secret_value()):
        raise ConfigError("admin_key is an API key too; operators need a key that no tenant has")
    return keyring


def read_grants(path: Path) -> Iterator[Grant]:
    """The keys of a file: a table per tenant in a `.toml` file, else a line per key. Raises ConfigError."""
    where = f"api_key_file={path}"
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".toml":
            return from_lines(text, where)
        return _from_toml(tomllib.loads(text), where)
    except OSError as error:
        raise ConfigError(f"{where}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: is not UTF-8 text") from None
    except tomllib.TOMLDecodeError:
        # The parser's message may quote what it can't read: part of a key.
        raise ConfigError(f"{where}: is not valid TOML") from None


def _from_toml(document: Mapping[str, Any], where: str) -> Iterator[Grant]:
    tenants = document.get("tenants")
    if not isinstance(tenants, dict) or len(document) != 1:
        raise ConfigError(f"{where}: write a table [tenants.NAME] per tenant, and nothing else")
    for name, table in tenants.items():
        here = f"{where}, tenant {require_name(name, where)}"
        keys = table.get("keys") if isinstance(table, dict) else None
        if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
            raise ConfigError(f'{here}: needs keys = ["...", ...]')
        if set(table) - set(_FIELDS):
            raise ConfigError(f"{here}: has a field that there is not; there are {', '.join(_FIELDS)}")
        for key in keys:
            yield grant_to(name, key, here)
