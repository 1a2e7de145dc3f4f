"""The flags of a command come from the settings: each has its environment name and default in its help."""

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

from hicache.config import OPTIONS, Option, Settings, load_settings, unknown_variables

_EVERY = frozenset(option.field for option in OPTIONS)
_GROUP_TITLES = {"cache": "cache (TOML table [cache])", "serve": "model and server (TOML table [serve])"}


def add_settings(parser: argparse.ArgumentParser, fields: Collection[str] = _EVERY) -> None:
    """Give the command settings as flags, all or some of them, and `--config` for the TOML file."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings [HICACHE_CONFIG]")
    groups = {name: parser.add_argument_group(title) for name, title in _GROUP_TITLES.items()}
    for option in OPTIONS:
        if option.field in fields:
            _add(groups[option.group], option)


def settings_from(arguments: argparse.Namespace) -> Settings:
    """The settings of this call; variables that look like settings and are none are named on stderr."""
    given = vars(arguments)
    flags = {option.field: given[option.field] for option in OPTIONS if option.field in given}
    settings = load_settings(flags, config_file=arguments.config)
    if unknown := unknown_variables():
        print(f"hicache: ignored, since these are no settings: {', '.join(unknown)}", file=sys.stderr)
    return settings


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    default = "" if option.default is None else f" (default: {option.default})"
    text = f"{option.help}{default} [{option.variable}]".replace("%", "%%")
    if option.many:
        group.add_argument(
            option.flag, dest=option.field, default=argparse.SUPPRESS, metavar="VALUE", help=text, action="append"
        )
    elif option.flag.startswith("--"):
        group.add_argument(option.flag, dest=option.field, default=argparse.SUPPRESS, metavar="VALUE", help=text)
    else:
        group.add_argument(option.field, nargs="?", default=argparse.SUPPRESS, metavar=option.flag, help=text)
        flag = f"--{option.field}"
        group.add_argument(flag, dest=option.field, default=argparse.SUPPRESS, metavar="VALUE", help="the same")
