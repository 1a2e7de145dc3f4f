"""What a URL of a built-in backend says, each value checked."""

import re
from collections.abc import Mapping
from pathlib import Path

from hicache.config.sizes import parse_size
from hicache.errors import ConfigError
from hicache.storage.file import FileBackend
from hicache.storage.memory import MemoryBackend
from hicache.storage.registry import StoreLocation

_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")


def open_file(location: StoreLocation) -> FileBackend:
    """`file:FOLDER?cap=10GiB&sync=30`; the folder may be relative, absolute or below ~."""
    if not location.path:
        raise ConfigError("store URL 'file:' names no folder; write for instance file:./store")
    options = location.known_options("cap", "sync")
    folder = Path(location.path).expanduser()
    return FileBackend(folder, _cap_bytes(options), sync_s=_seconds(options, "sync"))


def open_memory(location: StoreLocation) -> MemoryBackend:
    """`memory:?cap=1GiB`."""
    if location.path:
        raise ConfigError(f"a memory store has no path, but its URL gives {location.path!r}; write memory:")
    return MemoryBackend(_cap_bytes(location.known_options("cap")))


def _cap_bytes(options: Mapping[str, str]) -> int | None:
    text = options.get("cap")
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"store option cap={text!r}: {error}") from error


def _seconds(options: Mapping[str, str], name: str) -> float | None:
    text = options.get(name)
    if text is None:
        return None
    if not _SECONDS.fullmatch(text):
        raise ConfigError(f"store option {name}={text!r}: write seconds, as 30 or 0.5")
    return float(text)
