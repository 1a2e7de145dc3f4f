"""A nixl-posix URL names a folder and how the kernel is asked."""

from pathlib import Path

from hicache.errors import ConfigError
from hicache.storage.nixl.backend import NixlPosixBackend
from hicache.storage.nixl.engine import QUEUES
from hicache.storage.registry import StoreLocation


def open_nixl_posix(location: StoreLocation) -> NixlPosixBackend:
    """`nixl-posix:FOLDER?queue=uring`; the folder may be relative, absolute or below ~."""
    queue = location.known_options("queue").get("queue", "uring")
    if not location.path:
        raise ConfigError("store URL 'nixl-posix:' names no folder; write for instance nixl-posix:./store")
    if queue not in QUEUES:
        raise ConfigError(f"store option queue={queue!r}: say {', '.join(QUEUES)}")
    return NixlPosixBackend(Path(location.path).expanduser(), queue)
