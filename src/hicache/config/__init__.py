"""Settings are frozen values, parsed once from flags, environment and TOML; nobody else reads the environment."""

from hicache.config.environment import environment_value
from hicache.config.explain import redact
from hicache.config.groups import CacheConfig, ServeConfig, Settings
from hicache.config.load import load_settings, unknown_variables
from hicache.config.options import OPTIONS, Option
from hicache.config.sizes import format_size, parse_size

__all__ = [
    "OPTIONS",
    "CacheConfig",
    "Option",
    "ServeConfig",
    "Settings",
    "environment_value",
    "format_size",
    "load_settings",
    "parse_size",
    "redact",
    "unknown_variables",
]
