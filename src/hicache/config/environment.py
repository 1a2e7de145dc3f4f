"""A secret that a setting only names is read from the environment here, and never printed."""

import os

from hicache.errors import ConfigError


def environment_value(name: str) -> str:
    """What the variable holds; ConfigError when it is not set or empty."""
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"the environment has no variable {name!r}, or it is empty; set it, or name another one")
    return value
