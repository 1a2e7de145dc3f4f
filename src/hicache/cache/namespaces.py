"""A request's namespace is one of the model that the cache was built for, on the ranks that it was built on."""

from hicache.errors import ConfigError
from hicache.keys import WHOLE, Namespace


def require_fitting(namespace: Namespace, lookahead: int, *, alone: bool) -> None:
    """Raises ConfigError for another `lookahead` in tokens, and for a shard of its own unless the rank is `alone`."""
    if namespace.draft_lookahead != lookahead:
        raise ConfigError(
            f"the namespace has draft_lookahead={namespace.draft_lookahead}, and this cache was built for a model"
            f" with draft_lookahead={lookahead}; give both one"
        )
    if not alone and namespace.shard != WHOLE:
        raise ConfigError(
            f"the namespace has shard={namespace.shard!r}, but this cache tells its ranks apart by itself;"
            " leave shard out, so that ranks which hold equal bytes have equal keys"
        )
