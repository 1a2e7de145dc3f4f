"""A Valkey or Redis URL names a server, or some nodes of a cluster; its password is never printed."""

import ssl

from hicache.config import environment_value
from hicache.errors import ConfigError
from hicache.storage.registry import StoreLocation
from hicache.storage.remote import CALL_TIMEOUT_S, count_option, seconds_option, yes_option
from hicache.storage.valkey.backend import ValkeyBackend
from hicache.storage.valkey.servers import Cluster, Servers, SingleServer
from hicache.storage.valkey.wire import Address, Login

_PORT = 6379
_TLS_SCHEMES = ("rediss", "valkeys")


def open_valkey(location: StoreLocation) -> ValkeyBackend:
    """`valkey://HOST:PORT/DATABASE?timeout=5`, `redis:`; with TLS `valkeys:`, `rediss:`. Several nodes: `h1:p,h2:p`."""
    options = location.known_options(
        "timeout", "ttl", "cluster", "user", "password", "password_env", "ca", "certificate", "certificate_key"
    )
    user_part, _, server_part = location.path.rpartition("@")
    hosts, _, database = server_part.removeprefix("//").partition("/")
    addresses = [_address(location.scheme, host) for host in hosts.split(",")]
    user, _, password = user_part.partition(":")
    login = Login(
        options.get("user", user), _password(location, password), _database(location, database), _tls(location)
    )
    timeout_s = seconds_option(location, "timeout", CALL_TIMEOUT_S)
    ttl_s = count_option(location, "ttl", None)
    servers = _servers(location, addresses, login)
    return ValkeyBackend(servers, f"{location.scheme} store {hosts}", timeout_s=timeout_s, ttl_s=ttl_s)


def _servers(location: StoreLocation, addresses: list[Address], login: Login) -> Servers:
    if yes_option(location, "cluster"):
        if login.database:
            raise ConfigError(f"{location.scheme}: a cluster has only database 0; leave the number out of the URL")
        return Cluster(addresses, login)
    if len(addresses) > 1:
        raise ConfigError(f"{location.scheme}: several addresses are the nodes of a cluster; add cluster=yes to say so")
    return SingleServer(addresses[0], login)


def _address(scheme: str, text: str) -> Address:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(_PORT)
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"{scheme}: {text!r} is no server; write for instance {scheme}://127.0.0.1:{_PORT}/0")
    return Address(host.strip("[]"), int(port))


def _password(location: StoreLocation, written: str) -> str:
    options = location.options
    if (variable := options.get("password_env")) is None:
        return options.get("password", written)
    if written or "password" in options:
        raise ConfigError(f"{location.scheme}: the URL has a password and names a variable for it; leave one out")
    return environment_value(variable)


def _database(location: StoreLocation, text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{location.scheme}: {text!r} is no database; write its number, as in /0")
    return int(text)


def _tls(location: StoreLocation) -> ssl.SSLContext | None:
    names = [name for name in ("ca", "certificate", "certificate_key") if name in location.options]
    if location.scheme not in _TLS_SCHEMES:
        if names:
            raise ConfigError(f"{location.scheme}: option {names[0]!r} is for {_TLS_SCHEMES[1]}:, which uses TLS")
        return None
    try:
        context = ssl.create_default_context(cafile=location.options.get("ca"))
        if "certificate" in location.options:
            context.load_cert_chain(location.options["certificate"], location.options.get("certificate_key"))
    except OSError as error:
        raise ConfigError(f"{location.scheme}: {', '.join(names)} can't be used: {error}") from error
    return context
