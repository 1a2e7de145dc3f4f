"""The address is taken before the model is loaded, and the engine is closed however the server ends."""

import asyncio
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from hicache.config import ServeConfig, Settings
from hicache.engine import Engine, create_engine
from hicache.errors import ConfigError
from hicache.server.admin import Admin
from hicache.server.app import build_app
from hicache.server.key_file import access_of
from hicache.server.keys import Key
from hicache.server.tenants import Keyring

GRACE_S = 10
"""How long requests under way may go on when the server is asked to stop; then they end with an error that says so."""

_LAST_WORDS_S = 5
"""How long sending those errors may take before connections are cut off."""


def run(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM; 0 then. Raises ConfigError, in one line, for what can't be served."""
    logging.basicConfig(format="hicache: %(message)s", stream=sys.stderr)
    access = access_of(settings.serve)
    with take_address(settings.serve) as listener:
        engine = create_engine(settings)
        try:
            engine.set_quotas(access.quotas)
            listen(listener, settings.serve)
            _announce(engine, settings, listener, access.keyring)
            with _signals_end_only_the_server():
                _Server(engine, _admin(engine, settings.serve), access.keyring).run(sockets=[listener])
        finally:
            engine.close()
    return 0


def take_address(serve: ServeConfig) -> socket.socket:
    """A socket bound to `host` and `port` that does not listen yet. Raises ConfigError when it can't be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(serve.host, serve.port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"host={serve.host}: {error.strerror}; 127.0.0.1 is this machine only") from None
    listener = socket.socket(family, kind, protocol)
    try:
        _bind(listener, address)
    except OSError as error:
        listener.close()
        raise _not_to_be_had(serve, error) from None
    return listener


def listen(listener: socket.socket, serve: ServeConfig) -> None:
    """Let clients connect; they are answered once the server runs. Raises ConfigError when another was faster."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.listen()
    except OSError as error:
        raise _not_to_be_had(serve, error) from None


def _bind(listener: socket.socket, address: tuple[object, ...]) -> None:
    # With SO_REUSEADDR, two servers that still load their models could both bind. It is only needed where connections
    # of a server that has ended linger.
    try:
        listener.bind(address)
    except OSError:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)


def _not_to_be_had(serve: ServeConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"port={serve.port}: {serve.host}:{serve.port} can't be had ({error.strerror}); choose another --port"
    )


class _Server(uvicorn.Server):
    """Ends what still runs after the grace by closing the engine: clients are told, rather than cut off."""

    def __init__(self, engine: Engine, admin: Admin | None, keyring: Keyring) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(engine, admin, keyring),
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=GRACE_S + _LAST_WORDS_S,
            )
        )
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        grace = loop.call_later(GRACE_S, loop.run_in_executor, None, self._engine.close)
        try:
            await super().shutdown(sockets)
        finally:
            grace.cancel()


def _admin(engine: Engine, serve: ServeConfig) -> Admin | None:
    return None if serve.admin_key is None else Admin(engine, Key(serve.admin_key.get_secret_value()))


def _announce(engine: Engine, settings: Settings, listener: socket.socket, keyring: Keyring) -> None:
    lines = [f"hicache serves {engine.model_name}, prompts and answers of up to {engine.max_model_len} tokens"]
    lines += [f"  {line}" for line in engine.info.sizes]
    lines.append(f"  storage: {settings.cache.storage_url or 'none; --storage-url file:./store keeps pages'}")
    lines += [f"  degraded: {line}" for line in engine.health()]
    if settings.serve.admin_key is not None:
        lines.append("  admin: routes under /admin, for those who have the key")
    if keyring:
        lines.append(f"  tenants: {len(keyring.labels)}; /metrics is for those who have the admin key")
    lines += reached_at(*listener.getsockname()[:2], with_keys=bool(keyring))
    print("\n".join(lines), file=sys.stderr, flush=True)


def reached_at(host: str, port: int, *, with_keys: bool = False) -> list[str]:
    """Where clients reach a server that is bound to the address `host`, and who can."""
    shown = f"[{host}]" if ":" in host else host
    lines = [f"ready at http://{shown}:{port}/v1 (also /health and /metrics)"]
    if ipaddress.ip_address(host).is_loopback:
        lines.append("  this machine only; --host 0.0.0.0 opens it to others")
    elif with_keys:
        lines.append("  open to other machines, with authentication by key; nothing that is sent is encrypted")
    else:
        lines.append(
            "  warning: open to other machines without authentication: whoever reaches it can use it; --api-key"
        )
    return lines


@contextmanager
def _signals_end_only_the_server() -> Iterator[None]:
    # uvicorn stops gracefully and then raises the signal again: the default handlers would end the process before the
    # engine is closed.
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
