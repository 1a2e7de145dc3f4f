"""Flag, environment variable and TOML key of every setting follow from its group and field: nothing is named twice."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from hicache.config.groups import CacheConfig, Group, ServeConfig

CONFIG_FILE_VARIABLE: Final = "HICACHE_CONFIG"
POSITIONAL: Final = "model"
"""The one setting that the command line takes without a flag: `hicache serve MODEL`."""

GROUPS: Final[Mapping[str, type[Group]]] = {"cache": CacheConfig, "serve": ServeConfig}
# Settings of the server carry its name: a variable HICACHE_PORT is set by Kubernetes for a service called hicache.
_ENVIRONMENT_PREFIX: Final = {"cache": "HICACHE_", "serve": "HICACHE_SERVE_"}


@dataclass(frozen=True, slots=True)
class Option:
    """One setting and all the names it goes by."""

    group: str
    field: str
    flag: str
    variable: str
    default: str | int | float | None
    help: str
    many: bool = False
    """Whether a flag may be given several times."""


def _options(group: str) -> Iterator[Option]:
    defaults = GROUPS[group]().model_dump(mode="json")
    for field, info in GROUPS[group].model_fields.items():
        many = isinstance(defaults[field], list)
        yield Option(
            group=group,
            field=field,
            flag=field.upper() if field == POSITIONAL else "--" + field.replace("_", "-"),
            variable=_ENVIRONMENT_PREFIX[group] + field.upper(),
            default=None if many else defaults[field],
            help=info.description or "",
            many=many,
        )


OPTIONS: Final = tuple(option for group in GROUPS for option in _options(group))
"""Every setting, in the order of the groups."""
