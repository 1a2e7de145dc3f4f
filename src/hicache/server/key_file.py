"""What a key file says is what holds: every line is understood, or the server does not start; no key is shown."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache.cache import Quota
from hicache.config import ServeConfig
from hicache.errors import ConfigError
from hicache.server.tenants import Grant, Keyring, from_lines, grant, grant_to, require_name

_SHARES = ("device_share", "host_share")


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The keys of a file, and by tenant what memory it promises."""

    grants: tuple[Grant, ...] = ()
    quotas: Mapping[str, Quota] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a server, and by tenant what memory is promised."""

    keyring: Keyring
    quotas: Mapping[str, Quota]


def access_of(serve: ServeConfig) -> Access:
    """What the settings say, and the file that they name. Raises ConfigError for what is no key."""
    grants = tuple(grant(secret.get_secret_value(), "api_key") for secret in serve.api_key)
    file = KeyFile() if serve.api_key_file is None else read_key_file(serve.api_key_file)
    keyring = Keyring(grants + file.grants)
    if serve.admin_key is not None and keyring.knows(serve.admin_key.get_secret_value()):
        raise ConfigError("admin_key is an API key too; operators need a key that no tenant has")
    return Access(keyring, file.quotas)


def read_key_file(path: Path) -> KeyFile:
    """A table per tenant in a `.toml` file, else a line per key. Raises ConfigError."""
    where = f"api_key_file={path}"
    try:
        text = path.read_text(encoding="utf-8")
        file = _from_toml(tomllib.loads(text), where) if path.suffix == ".toml" else _from_lines(text, where)
    except OSError as error:
        raise ConfigError(f"{where}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: is not UTF-8 text") from None
    except tomllib.TOMLDecodeError:
        # The parser's message may quote what it can't read: part of a key.
        raise ConfigError(f"{where}: is not valid TOML") from None
    if not file.grants:
        raise ConfigError(f"{where}: it has no keys; write TENANT:KEY, one a line")
    return file


def _from_lines(text: str, where: str) -> KeyFile:
    return KeyFile(tuple(from_lines(text, where)))


def _from_toml(document: Mapping[str, Any], where: str) -> KeyFile:
    tenants = document.get("tenants")
    if not isinstance(tenants, dict) or len(document) != 1:
        raise ConfigError(f"{where}: write a table [tenants.NAME] per tenant, and nothing else")
    grants: list[Grant] = []
    quotas: dict[str, Quota] = {}
    for name, table in tenants.items():
        here = f"{where}, tenant {require_name(name, where)}"
        if not isinstance(table, dict) or set(table) - {"keys", *_SHARES}:
            raise ConfigError(f"{here}: has what is not known; there are keys, {', '.join(_SHARES)}")
        grants += [grant_to(name, key, here) for key in _keys(table, here)]
        shares = {share: _number(table[share], f"{here}, {share}") for share in _SHARES if share in table}
        if shares:
            quotas[name] = _quota(shares, here)
    return KeyFile(tuple(grants), quotas)


def _keys(table: Mapping[str, Any], here: str) -> list[str]:
    keys = table.get("keys")
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
        raise ConfigError(f'{here}: needs keys = ["...", ...]')
    return keys


def _number(value: object, here: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{here}: is no number; give a share such as 0.25")
    return float(value)


def _quota(shares: Mapping[str, float], here: str) -> Quota:
    try:
        return Quota(**shares)
    except ConfigError as error:
        raise ConfigError(f"{here}: {error}") from None
