"""Exports and imports go in steps: files are for any thread, and the owner only copies host pages."""

from dataclasses import dataclass

from hicache.controller import HybridCacheController, Prefetch
from hicache.controller.prefixes import copy_in, copy_out, layouts
from hicache.errors import CapacityError, ConfigError
from hicache.keys import Namespace
from hicache.storage.prefix_file import PrefixContent, require_same


@dataclass(frozen=True, slots=True)
class Export:
    """An export that has begun: pages come from storage and from the device to the host. `ready`: look no longer."""

    namespace: Namespace
    tokens: bytes
    pages: int
    ticket: Prefetch


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import brought: `pages` of the file's prefix can be resumed now, `new_pages` of a pool were not here."""

    pages: int
    new_pages: int


def require_one_rank(controller: HybridCacheController) -> None:
    """ConfigError with several ranks: each has a part of every page."""
    if not controller.alone:
        raise ConfigError("prefixes are exported and imported with one rank only; here are several")


def take_out(controller: HybridCacheController, export: Export) -> PrefixContent:
    """Copies what the host has. CapacityError if no prefix of it can be resumed."""
    content = copy_out(controller.state, export.namespace, export.tokens, export.pages)
    if content is None:
        raise CapacityError(
            f"nothing that can be resumed of these {export.pages} pages is in host memory or storage; compute"
            " the prompt first, or give the host more room"
        )
    return content


def put_in(controller: HybridCacheController, content: PrefixContent, namespace: Namespace) -> Imported:
    """Takes a prefix that was read from a file. ConfigError if it is not of this namespace and cache."""
    require_one_rank(controller)
    require_same(content, namespace, layouts(controller.state))
    controller.note_request(namespace, content.tokens)
    controller.flushes.use(namespace.fingerprint)
    span, new_pages = copy_in(controller.state, content)
    if span is None:
        return Imported(0, 0)
    controller.imported(span)
    return Imported(len(span), new_pages)
