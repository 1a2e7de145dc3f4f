"""A model as the cache sees it: which pools it has, what a slot of each holds, and which layer uses which."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from hicache.builder.families import FAMILIES, Family
from hicache.builder.fields import Fields
from hicache.builder.kinds import Kind, Tensors
from hicache.builder.patterns import LayerTypes
from hicache.builder.refusals import refuse
from hicache.coverage import Checkpoint, Coverage, Full, Window
from hicache.errors import ConfigError
from hicache.layout import PoolGeometry

_FULL = Full()


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """One kind of state.

    `layers[i]` is the model layer that writes the pool's layer i. `readers` are pairs (model layer, pool layer): layers
    that own nothing and read what another layer wrote. With `chunk_tokens`, a token sees its own chunk of so many
    tokens only, and the coverage is `Window(chunk_tokens)`. `replicated`: ranks that share the layers hold equal bytes
    in it, and reach one store; then one of them writes its pages, and all read them.
    """

    name: str
    geometry: PoolGeometry
    layers: tuple[int, ...]
    coverage: Coverage = _FULL
    derived_from: str | None = None
    packed_drafts: tuple[PoolGeometry, ...] = ()
    readers: tuple[tuple[int, int], ...] = ()
    chunk_tokens: int | None = None
    replicated: bool = False

    def map_layer(self, layer: int) -> int | None:
        """The pool's layer that model layer `layer` writes or reads."""
        if layer in self.layers:
            return self.layers.index(layer)
        return dict(self.readers).get(layer)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot with what is packed into it."""
        return self.geometry.slot_bytes + sum(draft.slot_bytes for draft in self.packed_drafts)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """All pools of a model, the anchor first.

    `draft_lookahead`: how many tokens after a page are part of the page's identity, because a draft's state saw them.
    """

    layer_count: int
    pools: tuple[PoolDescription, ...]
    draft_lookahead: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in every pool."""
        return sum(pool.slot_bytes for pool in self.pools)

    @property
    def fingerprint(self) -> str:
        """What goes into `Namespace.geometry`: two models that differ in it can't read each other's pages."""
        return ";".join(
            f"{pool.name}:{'+'.join(part.fingerprint for part in (pool.geometry, *pool.packed_drafts))}"
            for pool in self.pools
        )


class TransformersConfig(Protocol):
    """A config of transformers (`PretrainedConfig`), as far as it is needed here."""

    def to_dict(self) -> dict[str, Any]:
        """Its fields by name."""


ModelConfig: TypeAlias = ModelDescription | TransformersConfig | Mapping[str, Any]
"""A description of one's own, a transformers config, or the content of its config.json."""


def describe_model(config: ModelConfig, page_size: int, dtype: str | None = None) -> ModelDescription:
    """The pools of a model. `dtype` overrides the one that the config names (float32 where it names none).

    A field that the config lacks has the value that transformers takes for it. Raises ConfigError, with the model's
    type and the reason, for a model whose state can't be kept.
    """
    if isinstance(config, ModelDescription):
        _require_page_size(config, page_size)
        return config
    values = dict(config) if isinstance(config, Mapping) else config.to_dict()
    refuse(values)
    family = FAMILIES[values["model_type"]]
    fields = Fields({**family.defaults, **values}, dtype or _dtype_name(values))
    fields = fields.updated(family.fill(fields))
    types = _layer_types(family, fields)
    return _describe(family, fields.overridden(family.overrides(fields, types)), types, page_size)


def _layer_types(family: Family, fields: Fields) -> LayerTypes:
    types = family.layer_types(fields)
    unknown = sorted(set(types) - set(family.keeps))
    if unknown:
        raise fields.refused(
            f"layers of type {', '.join(unknown)}, which are not kept; these are: {', '.join(family.keeps)}"
        )
    if len(types) != fields.layers:
        raise fields.refused(f"num_hidden_layers={fields.layers}, but types for {len(types)} layers")
    return types


@dataclass(frozen=True, slots=True)
class _Part:
    """What one layer keeps in one pool."""

    layer: int
    kind: Kind
    tensors: Tensors


def _describe(family: Family, fields: Fields, types: LayerTypes, page_size: int) -> ModelDescription:
    reads = family.reads(fields, types)
    parts: dict[str, list[_Part]] = {}
    for layer, layer_type in enumerate(types):
        for kind in family.keeps[layer_type] if layer not in reads else ():
            tensors = kind.tensors(fields.at(layer))
            if tensors:
                parts.setdefault(kind.pool, []).append(_Part(layer, kind, tensors))
    pools = [_pool(name, found, fields, reads, page_size) for name, found in parts.items()]
    if not pools:
        raise fields.refused("no layer that keeps anything")
    return ModelDescription(len(types), tuple(sorted(pools, key=_anchor_first)))


def _pool(name: str, parts: list[_Part], fields: Fields, reads: Mapping[int, int], page_size: int) -> PoolDescription:
    kind, layers = parts[0].kind, tuple(part.layer for part in parts)
    coverage = kind.coverage(fields)
    return PoolDescription(
        name=name,
        geometry=PoolGeometry(
            tuple(part.tensors for part in parts), 1 if isinstance(coverage, Checkpoint) else page_size
        ),
        layers=layers,
        coverage=coverage,
        derived_from=kind.derived_from,
        readers=tuple((reader, layers.index(owner)) for reader, owner in reads.items() if owner in layers),
        chunk_tokens=None if kind.chunk is None else fields.count(kind.chunk),
    )


def _anchor_first(pool: PoolDescription) -> int:
    """Pools of the whole prefix, what is derived from them, windows, snapshots."""
    if isinstance(pool.coverage, Full):
        return 0 if pool.derived_from is None else 1
    return 2 if isinstance(pool.coverage, Window) else 3


def _require_page_size(model: ModelDescription, page_size: int) -> None:
    for pool in model.pools:
        tokens = 1 if isinstance(pool.coverage, Checkpoint) else page_size
        if pool.geometry.tokens_per_slot != tokens:
            raise ConfigError(
                f"page_size={page_size}: a slot of pool {pool.name!r} holds {pool.geometry.tokens_per_slot} tokens;"
                f" describe it with {tokens}, or set page_size to what it was described with"
            )


def _dtype_name(fields: Mapping[str, Any]) -> str:
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    return str(name).removeprefix("torch.")
