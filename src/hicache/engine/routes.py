"""Which pool each layer of a model works on, found from the description once; what the engine can't use is refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from hicache.builder import ModelDescription, PoolDescription
from hicache.coverage import Checkpoint, Window
from hicache.engine.token_pools import Sight
from hicache.errors import ConfigError
from hicache.units import PoolName

Place: TypeAlias = tuple[PoolName, int]
"""A pool and a layer of it."""

_KEYS_AND_VALUES = ("k", "v")
_LATENT = ("latent", "rope")
_INDEXER = ("indexer",)


@dataclass(frozen=True, slots=True)
class Routes:
    """By model layer: where its keys and values, latents, indexer keys and recurrent state lie.

    `sights` says per token pool which tokens a token sees; `sources` whose slots a token pool lives at.
    """

    attention: Mapping[int, Place]
    latents: Mapping[int, Place]
    indexers: Mapping[int, Place]
    states: Mapping[int, Place]
    sights: Mapping[PoolName, Sight]
    sources: Mapping[PoolName, PoolName]

    @classmethod
    def of(cls, model: ModelDescription) -> "Routes":
        """Raises ConfigError, by name, for a pool that the engine has no use for."""
        found: dict[str, dict[int, Place]] = {"attention": {}, "latents": {}, "indexers": {}, "states": {}}
        for pool in model.pools:
            kind = found[_kind(pool)]
            for layer in range(model.layer_count):
                own = pool.map_layer(layer)
                if own is not None:
                    kind[layer] = (pool.name, own)
        token_pools = [pool for pool in model.pools if not isinstance(pool.coverage, Checkpoint)]
        return cls(
            **found,
            sights={pool.name: _sight(pool) for pool in token_pools},
            sources={pool.name: pool.derived_from or pool.name for pool in token_pools},
        )

    @property
    def token_pools(self) -> tuple[PoolName, ...]:
        """Pools with slots of their own that hold something per token."""
        return tuple(name for name, source in self.sources.items() if name == source)

    @property
    def gathered_pools(self) -> tuple[PoolName, ...]:
        """Pools of keys and values, which are gathered for attention one sequence at a time."""
        return tuple(dict.fromkeys(pool for pool, _ in self.attention.values()))

    @property
    def sees_less(self) -> bool:
        """Whether some tokens see only a part of what is before them, so that pages behind it can go."""
        return any(sight != Sight() for sight in self.sights.values())

    @property
    def state_pools(self) -> tuple[PoolName, ...]:
        """Pools of recurrent state."""
        return tuple(dict.fromkeys(pool for pool, _ in self.states.values()))


def _kind(pool: PoolDescription) -> str:
    if isinstance(pool.coverage, Checkpoint):
        return "states"
    tensors = tuple(spec.name for spec in pool.geometry.layers[0])
    if tensors == _KEYS_AND_VALUES:
        return "attention"
    if tensors == _LATENT:
        return "latents"
    if tensors == _INDEXER:
        return "indexers"
    raise ConfigError(f"pool {pool.name!r} holds {', '.join(tensors)} per token; the engine has no use for that")


def _sight(pool: PoolDescription) -> Sight:
    if pool.chunk_tokens is not None:
        return Sight(chunk=pool.chunk_tokens)
    return Sight(window=pool.coverage.tokens) if isinstance(pool.coverage, Window) else Sight()
