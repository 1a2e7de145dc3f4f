"""A model as the cache sees it: which pools it has, what a slot of each holds, and which layer uses which."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from hicache.coverage import Checkpoint, Coverage, Full
from hicache.errors import ConfigError
from hicache.layout import PoolGeometry, TensorSpec

FULL_ATTENTION = ("llama", "qwen2", "qwen3", "mistral", "olmo2", "granite", "starcoder2", "smollm3")
"""Model types of transformers whose layers are all full attention, K and V per head, unless a config says otherwise."""

_OTHER_STATE = {
    "kv_lora_rank": "latent attention (MLA)",
    "attention_chunk_size": "chunked attention",
    "index_topk": "an indexer",
    "linear_num_key_heads": "linear attention state",
    "mamba_d_state": "Mamba state",
    "state_size": "Mamba state",
    "conv_L_cache": "short convolution state",
    "quantization_config": "quantised weights",
}

_FULL = Full()


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """One kind of state.

    `layers[i]` is the model layer that writes the pool's layer i. `readers` are pairs (model layer, pool layer): layers
    that own nothing and read what another layer wrote. With `chunk_tokens`, a token sees its own chunk of so many
    tokens only, and the coverage is `Window(chunk_tokens)`.
    """

    name: str
    geometry: PoolGeometry
    layers: tuple[int, ...]
    coverage: Coverage = _FULL
    derived_from: str | None = None
    packed_drafts: tuple[PoolGeometry, ...] = ()
    readers: tuple[tuple[int, int], ...] = ()
    chunk_tokens: int | None = None

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


def full_attention(layers: int, kv_heads: int, head_dim: int, dtype: str, page_size: int) -> ModelDescription:
    """A model of `layers` full-attention layers with K and V of shape [kv_heads, head_dim] per token each."""
    tensors = (TensorSpec("k", (kv_heads, head_dim), dtype), TensorSpec("v", (kv_heads, head_dim), dtype))
    geometry = PoolGeometry.uniform(layers, tensors, page_size)
    return ModelDescription(layers, (PoolDescription("kv", geometry, tuple(range(layers))),))


def describe_model(config: ModelConfig, page_size: int, dtype: str | None = None) -> ModelDescription:
    """The pools of a model. `dtype` overrides the one that the config names.

    Raises ConfigError, with the model's type and the reason, for a model whose state is not kept (so far: anything but
    full attention in every layer).
    """
    if isinstance(config, ModelDescription):
        _require_page_size(config, page_size)
        return config
    fields = dict(config) if isinstance(config, Mapping) else config.to_dict()
    _refuse_other_state(fields)
    heads = _count(fields, "num_attention_heads")
    return full_attention(
        layers=_count(fields, "num_hidden_layers"),
        kv_heads=_count(fields, "num_key_value_heads") if fields.get("num_key_value_heads") is not None else heads,
        head_dim=_count(fields, "head_dim") if fields.get("head_dim") is not None else _head_dim(fields, heads),
        dtype=dtype or _dtype_name(fields),
        page_size=page_size,
    )


def _require_page_size(model: ModelDescription, page_size: int) -> None:
    for pool in model.pools:
        tokens = 1 if isinstance(pool.coverage, Checkpoint) else page_size
        if pool.geometry.tokens_per_slot != tokens:
            raise ConfigError(
                f"page_size={page_size}: a slot of pool {pool.name!r} holds {pool.geometry.tokens_per_slot} tokens;"
                f" describe it with {tokens}, or set page_size to what it was described with"
            )


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"model type {fields['model_type']!r} with {name}={value!r}; it must be a whole number above 0"
        )
    return value


def _head_dim(fields: Mapping[str, Any], heads: int) -> int:
    hidden = _count(fields, "hidden_size")
    if hidden % heads:
        raise ConfigError(
            f"model type {fields['model_type']!r} with hidden_size={hidden}, which {heads} heads can't share evenly;"
            " give head_dim"
        )
    return hidden // heads


def _refuse_other_state(fields: Mapping[str, Any]) -> None:
    model = fields.get("model_type", "(no model_type)")
    if model not in FULL_ATTENTION:
        raise ConfigError(f"model type {model!r} is not supported; these are: {', '.join(FULL_ATTENTION)}")
    for field, state in _OTHER_STATE.items():
        if fields.get(field):
            raise ConfigError(f"model type {model!r} with {field}={fields[field]!r} has {state}, which is not kept yet")
    kinds = sorted(set(fields.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        raise ConfigError(f"model type {model!r} has layers of type {', '.join(kinds)}, which are not kept yet")
    windowed = fields.get("use_sliding_window", True) and fields.get("sliding_window")
    if windowed and not fields.get("layer_types"):
        raise ConfigError(f"model type {model!r} has sliding_window={windowed}, which is not kept yet")


def _dtype_name(fields: Mapping[str, Any]) -> str:
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    return str(name).removeprefix("torch.")
