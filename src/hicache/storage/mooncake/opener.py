"""A Mooncake URL names the master of a store, and what this process is in it."""

from hicache.config import parse_size
from hicache.errors import ConfigError
from hicache.storage.mooncake.backend import MooncakeBackend
from hicache.storage.mooncake.client import Client, Place
from hicache.storage.registry import StoreLocation
from hicache.storage.remote import CALL_TIMEOUT_S, count_option, seconds_option

_PORT = 50051


def open_mooncake(location: StoreLocation) -> MooncakeBackend:
    """`mooncake://MASTER:PORT?host=10.0.0.7&segment=4GiB&protocol=rdma&device=mlx5_0`."""
    options = location.known_options("timeout", "metadata", "host", "protocol", "device", "segment", "replicas")
    master = location.path.removeprefix("//")
    if not master or "/" in master:
        raise ConfigError(
            f"a mooncake URL names a master and nothing else: write for instance mooncake://10.0.0.1:{_PORT}"
        )
    place = Place(
        master=master if ":" in master else f"{master}:{_PORT}",
        metadata=options.get("metadata", "P2PHANDSHAKE"),
        host=options.get("host", "127.0.0.1"),
        protocol=options.get("protocol", "tcp"),
        device=options.get("device", ""),
        segment_bytes=_segment_bytes(options.get("segment", "0")),
        replicas=count_option(location, "replicas", 1) or 1,
    )
    timeout_s = seconds_option(location, "timeout", CALL_TIMEOUT_S)
    return MooncakeBackend(Client(place), f"mooncake store {place.master}", timeout_s=timeout_s)


def _segment_bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"store option segment={text!r}: {error}") from error
