"""What a URL of a built-in backend says, each value checked."""

from pathlib import Path

from hicache.config.sizes import parse_size
from hicache.errors import ConfigError
from hicache.storage.file import FileBackend
from hicache.storage.memory import MemoryBackend
from hicache.storage.registry import StoreLocation


def open_file(location: StoreLocation) -> FileBackend:
    """`file:FOLDER?cap=10GiB`; the folder may be relative, absolute or below ~."""
    if not location.path:
        raise ConfigError("store URL 'file:' names no folder; write for instance file:./store")
    cap_bytes = _cap_bytes(location)
    return FileBackend(Path(location.path).expanduser(), cap_bytes)


def open_memory(location: StoreLocation) -> MemoryBackend:
    """`memory:?cap=1GiB`."""
    if location.path:
        raise ConfigError(f"a memory store has no path, but its URL gives {location.path!r}; write memory:")
    return MemoryBackend(_cap_bytes(location))


def _cap_bytes(location: StoreLocation) -> int | None:
    text = location.known_options("cap").get("cap")
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"store option cap={text!r}: {error}") from error
