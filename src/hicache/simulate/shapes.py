"""Models that exist only as pools: every kind of state that the cache keeps, alone and together."""

from dataclasses import dataclass, replace

from hicache.builder import ModelDescription, PoolDescription
from hicache.coverage import Checkpoint, Coverage, Full, Window
from hicache.errors import ConfigError
from hicache.layout import PoolGeometry, TensorSpec
from hicache.simulate.content import Sight
from hicache.units import PoolName

_WORD = (TensorSpec("word", (), "uint64"),)

SHAPES = ("full", "window", "state", "latent", "full+window", "full+state", "all")
"""Which pools a model has. `latent` has a derived pool, `all` one of every kind."""

DRAFTS = ("none", "packed", "sidecar")
"""Where the state of a drafter lies: nowhere, in its owner's pages, or in a derived pool."""

_SIDECAR = "draft"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's kinds of state. `window` in tokens; `lookahead`: tokens behind a page that its drafts depend on."""

    kind: str = "full"
    window: int = 8
    draft: str = "none"
    lookahead: int = 0

    def __post_init__(self) -> None:
        if self.kind not in SHAPES:
            raise ConfigError(f"shape {self.kind!r} is not known; give one of {', '.join(SHAPES)}")

    def describe(self, page_size: int) -> ModelDescription:
        """Its pools, as `build_kv_cache` takes them."""
        pools = _pools(self, page_size)
        if self.draft == "packed":
            pools[0] = replace(pools[0], packed_drafts=(_geometry(1, page_size),))
        elif self.draft == "sidecar":
            pools.append(_pool(_SIDECAR, (0,), page_size, Full(), pools[0].name))
        layers = 1 + max(layer for pool in pools for layer in pool.layers)
        return ModelDescription(layers, tuple(pools), self.lookahead)

    @property
    def draft_memory(self) -> PoolName | None:
        """The device pool that a drafter writes to."""
        anchor = "latent" if self.kind == "latent" else "kv"
        return {"none": None, "packed": f"{anchor}.draft0", "sidecar": _SIDECAR}[self.draft]


@dataclass(frozen=True, slots=True)
class Routes:
    """Which pools a model works on (see `hicache.engine.compute.Routing`), and what its tokens see of them.

    `sources`: the pool at whose slots a pool lies.
    """

    token_pools: tuple[PoolName, ...]
    state_pools: tuple[PoolName, ...]
    sees_less: bool
    sights: tuple[Sight, ...]
    sources: dict[PoolName, PoolName]

    @classmethod
    def of(cls, model: ModelDescription) -> "Routes":
        """Those of a description that `Shape.describe` made."""
        tokens = [pool for pool in model.pools if not isinstance(pool.coverage, Checkpoint)]
        seen = [pool for pool in tokens if pool.name != _SIDECAR]
        return cls(
            tuple(pool.name for pool in tokens if pool.derived_from is None),
            tuple(pool.name for pool in model.pools if isinstance(pool.coverage, Checkpoint)),
            any(isinstance(pool.coverage, Window) for pool in tokens),
            tuple(Sight(pool.name, len(pool.geometry.layers), _window(pool.coverage)) for pool in seen),
            {pool.name: pool.derived_from or pool.name for pool in model.pools},
        )


def _window(coverage: Coverage) -> int | None:
    return coverage.tokens if isinstance(coverage, Window) else None


def _pools(shape: Shape, page: int) -> list[PoolDescription]:
    window = Window(shape.window)
    match shape.kind:
        case "full":
            return [_pool("kv", (0, 1), page)]
        case "window":
            return [_pool("swa", (0, 1), page, window)]
        case "state":
            return [_pool("state", (0, 1), 1, Checkpoint())]
        case "latent":
            return [_pool("latent", (0, 1), page), _pool("indexer", (1,), page, Full(), "latent")]
        case "full+window":
            return [_pool("kv", (1,), page), _pool("swa", (0,), page, window)]
        case "full+state":
            return [_pool("kv", (1,), page), _pool("state", (0,), 1, Checkpoint())]
    return [
        _pool("kv", (0,), page),
        _pool("indexer", (0,), page, Full(), "kv"),
        _pool("swa", (1,), page, window),
        _pool("state", (2,), 1, Checkpoint()),
    ]


def _pool(
    name: str, layers: tuple[int, ...], page: int, coverage: Coverage | None = None, source: str | None = None
) -> PoolDescription:
    return PoolDescription(name, _geometry(len(layers), page), layers, coverage or Full(), source)


def _geometry(layers: int, tokens: int) -> PoolGeometry:
    return PoolGeometry.uniform(layers, _WORD, tokens)
