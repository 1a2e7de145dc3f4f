"""What an operator does to an engine happens between two steps; what takes long is done on the caller's thread."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from hicache.cache import CacheStats, Flush, Flushed, Imported, UnifiedRadixCache
from hicache.cache.tokens import Tokens
from hicache.engine.core import EngineCore
from hicache.errors import InUseError, StorageError
from hicache.keys import Namespace
from hicache.storage import PageStore, open_store
from hicache.storage.prefix_file import read_prefix, write_prefix

T = TypeVar("T")

_LOOK_S = 0.005


class Caller(Protocol):
    """Runs a function on the engine's thread, between two steps."""

    def call(self, function: Callable[[EngineCore], T], timeout_s: float | None = None) -> T:
        """What `function` returns or raises. Raises ClosedError when the engine has ended."""


class NewWeights(Protocol):
    """Weights that were loaded and fit."""

    @property
    def namespace(self) -> Namespace:
        """What sets apart what they compute."""

    @property
    def take(self) -> Callable[[], None]:
        """Puts them in place of the old ones, between two steps."""


class NewWeightsLoader(Protocol):
    """Loads weights beside those that run."""

    def load(self, folder: str, draft: str | None) -> NewWeights:
        """Raises ConfigError, by name and with nothing changed, for what does not fit."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Every slot has exactly one owner. `idle`: no request is open, and nothing is pinned, lent or in flight."""

    idle: bool
    open_matches: int
    pins: int
    in_flight: int


def flush(caller: Caller, namespace: Namespace | None, *, force: bool, timeout_s: float) -> Flushed:
    """`cache.flush`, to the end: StorageError when storage has not answered after `timeout_s` seconds."""
    return finish(caller, caller.call(lambda core: core.cache.flush(namespace, force=force)), timeout_s)


def finish(caller: Caller, begun: Flush, timeout_s: float) -> Flushed:
    """Waits for what a flush does in storage."""
    deadline = time.monotonic() + timeout_s
    while not caller.call(lambda core: begun.done):
        if time.monotonic() > deadline:
            raise StorageError(
                f"memory is flushed, but storage has not answered for {timeout_s:g} s; nothing is fetched before it has"
            )
        time.sleep(_LOOK_S)
    return begun.result()


def attach(caller: Caller, url: str, size: str | int | None) -> None:
    """Opens a store and uses it. InUseError when one is attached, ConfigError or StorageError when it can't be had."""
    _use(caller, url, size, _attach)


def detach(caller: Caller) -> None:
    """Stops using the store, if there is one. What is under way ends first."""
    caller.call(lambda core: core.cache.detach_storage_backend())


def switch(caller: Caller, url: str, size: str | int | None) -> None:
    """Opens a store and uses it in place of the one that is attached, if any; on an error, that one stays."""
    _use(caller, url, size, _switch)


def export_prefix(caller: Caller, tokens: Tokens, namespace: Namespace, path: str | Path, timeout_s: float) -> int:
    """`cache.export_prefix` beside running requests; after `timeout_s` seconds, of what has come by then."""
    export = caller.call(lambda core: core.cache.begin_export(tokens, namespace))
    deadline = time.monotonic() + timeout_s
    while not caller.call(lambda core: core.cache.export_ready(export)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    content = caller.call(lambda core: core.cache.finish_export(export))
    write_prefix(Path(path), content)
    return content.pages


def import_prefix(caller: Caller, path: str | Path, namespace: Namespace) -> Imported:
    """`cache.import_prefix` beside running requests: the file is read and checked on the caller's thread."""
    content = read_prefix(Path(path))
    return caller.call(lambda core: core.cache.take_prefix(content, namespace))


def audit(caller: Caller) -> Audit:
    """Checks the cache's books. An InvariantError is raised, and ends the engine: what it holds can't be trusted."""
    return caller.call(lambda core: _audited(core.cache))


def _use(caller: Caller, url: str, size: str | int | None, use: Callable[[UnifiedRadixCache, PageStore], None]) -> None:
    breaker = caller.call(lambda core: core.breaker)
    store = PageStore(open_store(url, cap=size), breaker)
    try:
        caller.call(lambda core: use(core.cache, store))
    except BaseException:
        store.close()
        raise


def _attach(cache: UnifiedRadixCache, store: PageStore) -> None:
    if cache.controller.storage is not None:
        raise InUseError("a store is attached; detach it first, or switch")
    cache.attach_storage_backend(store)


def _switch(cache: UnifiedRadixCache, store: PageStore) -> None:
    cache.detach_storage_backend()
    cache.attach_storage_backend(store)


def _audited(cache: UnifiedRadixCache) -> Audit:
    cache.audit()
    stats = cache.stats()
    return Audit(_is_idle(stats), stats.open_matches, stats.pins, stats.in_flight)


def _is_idle(stats: CacheStats) -> bool:
    held = stats.open_matches + stats.pins + stats.in_flight + sum(pool.other for pool in stats.pools)
    return held == 0
