"""Backends are found by name and imported when they are first opened; a missing one says how to install it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from hicache.config import redact
from hicache.errors import ConfigError
from hicache.storage.protocol import StorageBackend

ENTRY_POINT_GROUP = "hicache.storage"
"""An installed package offers a backend by an entry point of this group: name = URL scheme, value = an Opener."""


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A store's URL, taken apart: `scheme:path?name=value&...`, percent-decoded; options are still text."""

    scheme: str
    path: str
    options: Mapping[str, str]

    def known_options(self, *names: str) -> Mapping[str, str]:
        """The options that were given; ConfigError if one is not among `names`. Call it before anything is opened."""
        unknown = sorted(set(self.options) - set(names))
        if unknown:
            known = ", ".join(names) or "none"
            raise ConfigError(f"{self.scheme}: stores have no option {unknown[0]!r}; there are: {known}")
        return self.options


class Opener(Protocol):
    """Opens a backend. ConfigError for an option that it doesn't know or whose value is wrong."""

    def __call__(self, location: StoreLocation) -> StorageBackend:
        """The opened backend."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """Where a backend's opener is (`module:attribute`), and what to type when that module can't be imported."""

    target: str
    install: str


_BUILT_IN = {
    "file": BackendSpec("hicache.storage.openers:open_file", "pip install hicache"),
    "memory": BackendSpec("hicache.storage.openers:open_memory", "pip install hicache"),
    "mooncake": BackendSpec(
        "hicache.storage.mooncake.opener:open_mooncake",
        "pip install 'hicache[mooncake]', and libibverbs1 and librdmacm1 of the system",
    ),
    "nixl-posix": BackendSpec(
        "hicache.storage.nixl.opener:open_nixl_posix",
        "pip install --no-deps nixl-cu12, or 'hicache[nixl]'",
    ),
    "s3": BackendSpec("hicache.storage.s3.opener:open_s3", "pip install 'hicache[s3]'"),
    **dict.fromkeys(
        ("redis", "rediss", "valkey", "valkeys"),
        BackendSpec("hicache.storage.valkey.opener:open_valkey", "pip install hicache"),
    ),
}

_registered: dict[str, BackendSpec | Opener] = {}


def register_backend(scheme: str, backend: BackendSpec | Opener) -> None:
    """Makes `scheme:` URLs open this backend, in this process. ConfigError if the name is taken."""
    if scheme in _BUILT_IN or scheme in _registered:
        raise ConfigError(f"a storage backend named {scheme!r} is registered already; choose another name")
    _registered[scheme] = backend


def unregister_backend(scheme: str) -> None:
    """Takes a registered name back; ConfigError if there is none."""
    if _registered.pop(scheme, None) is None:
        raise ConfigError(f"no storage backend named {scheme!r} was registered")


def backend_names() -> tuple[str, ...]:
    """All names that a store's URL may begin with, built in, registered and installed; sorted."""
    return tuple(sorted({*_BUILT_IN, *_registered, *(point.name for point in _installed())}))


def open_store(url: str, **options: object) -> StorageBackend:
    """Opens `file:./store?cap=10GiB`, `memory:` or whatever else is installed; `options` go before those in the URL.

    Raises ConfigError for a URL, name or option that is not understood, StorageError if the store can't be used.
    """
    location = parse_location(url, options)
    return _find_opener(location.scheme)(location)


def parse_location(url: str, options: Mapping[str, object]) -> StoreLocation:
    """Takes a store's URL apart. ConfigError says what is wrong with it; secrets in it are not shown."""
    shown = redact(url)
    if "\0" in url:
        raise ConfigError("a store URL cannot have a NUL character in it")
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise ConfigError(f"store URL {shown!r} is not understood: {error}") from error
    if not parts.scheme:
        raise ConfigError(f"store URL {shown!r} names no kind of store; write for instance file:{shown}")
    if parts.fragment:
        raise ConfigError(f"store URL {shown!r} has a '#'; write it as %23")
    named = dict(query)
    if len(named) != len(query):
        raise ConfigError(f"store URL {shown!r} gives an option twice")
    given = {name: str(value) for name, value in options.items() if value is not None}
    return StoreLocation(parts.scheme, unquote(parts.netloc + parts.path), named | given)


def _find_opener(scheme: str) -> Opener:
    found = _registered.get(scheme) or _BUILT_IN.get(scheme)
    if isinstance(found, BackendSpec):
        return _import_opener(scheme, found)
    if found is not None:
        return found
    for point in _installed():
        if point.name == scheme:
            return _load(scheme, point.load, f"reinstall {point.dist.name if point.dist else point.module}")
    raise ConfigError(f"no storage backend named {scheme!r}; there are: {', '.join(backend_names())}")


def _import_opener(scheme: str, spec: BackendSpec) -> Opener:
    module, _, attribute = spec.target.partition(":")
    return _load(scheme, lambda: vars(import_module(module))[attribute], spec.install)


def _load(scheme: str, load: Callable[[], object], install: str) -> Opener:
    try:
        opener = load()
    except ImportError as error:
        raise ConfigError(
            f"storage backend {scheme!r} needs {error.name or error}, which is not here: {install}"
        ) from error
    if not callable(opener):
        raise ConfigError(f"storage backend {scheme!r} is registered as something that can't be called: {opener!r}")
    return opener


def _installed() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))
