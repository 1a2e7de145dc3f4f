"""A flush either finds nobody in its way, or every request that runs on what goes is told, before anything happens."""

from collections import Counter
from collections.abc import Iterable

from hicache.cache.match import Match
from hicache.controller import Flush, HybridCacheController
from hicache.errors import InUseError


def flush(
    controller: HybridCacheController, matches: Iterable[Match], scope: bytes | None, *, force: bool, used_only: bool
) -> Flush:
    """Flush the namespace with the fingerprint `scope`, or all. InUseError: a match is open in it."""
    running = [one for one in matches if not one.flushed and scope in (None, one.root)]
    if running and not force:
        raise InUseError(
            f"{len(running)} requests run on what is to be flushed; ask again when they have ended, or force it:"
            " they then go on with what they have"
        )
    begun, renamed = controller.flush(scope, Counter(one.root for one in running), used_only=used_only)
    for one in running:
        one.go_on_as(renamed[one.root])
    return begun
