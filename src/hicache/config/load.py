"""Flags win over the environment, the environment over the TOML file, the file over defaults."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache.config.explain import did_you_mean
from hicache.config.groups import Settings
from hicache.config.options import CONFIG_FILE_VARIABLE, GROUPS, OPTIONS
from hicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Source:
    """What the user said about one group so far, and how they wrote each name."""

    values: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    def say(self, name: str, value: object, label: str) -> None:
        self.values[name] = value
        self.labels[name] = label


def load_settings(
    flags: Mapping[str, object],
    *,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from flags (by field name), the environment and a TOML file (HICACHE_CONFIG unless `config_file`).

    An empty variable counts as not set. Raises ConfigError of one line that names what to change.
    """
    environ = os.environ if environ is None else environ
    sources = {group: _Source() for group in GROUPS}
    path = config_file or environ.get(CONFIG_FILE_VARIABLE)
    if path:
        _read_file(Path(path), sources)
    for option in OPTIONS:
        source = sources[option.group]
        if value := environ.get(option.variable):
            source.say(option.field, value, option.variable)
        if option.field in flags:
            source.say(option.field, flags[option.field], option.flag)
    groups = {
        name: GROUPS[name].model_validate(source.values, context=source.labels) for name, source in sources.items()
    }
    labels = {name: label for source in sources.values() for name, label in source.labels.items()}
    return Settings.model_validate(groups, context=labels)


def unknown_variables(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Variables that begin like a setting of hicache and are none, sorted."""
    names = os.environ if environ is None else environ
    known = {option.variable for option in OPTIONS} | {CONFIG_FILE_VARIABLE}
    return tuple(sorted(name for name in names if name.startswith("HICACHE_") and name not in known))


def _read_file(path: Path, sources: Mapping[str, _Source]) -> None:
    for table, settings in _parse(path).items():
        if table not in sources or not isinstance(settings, dict):
            tables = ", ".join(f"[{group}]" for group in sources)
            raise ConfigError(
                f"{path}: {table} is not a table of settings{did_you_mean(table, sources)}; there are {tables}"
            )
        for name, value in settings.items():
            sources[table].say(name, value, f"{path}: [{table}] {name}")


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read as a configuration file: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
