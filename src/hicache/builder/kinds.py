"""Every kind of state that a layer can keep: the pool it lies in, its tensors, and what of a prefix it needs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from hicache.builder.fields import Fields
from hicache.coverage import Checkpoint, Coverage, Full, Window
from hicache.layout import TensorSpec

Tensors: TypeAlias = tuple[TensorSpec, ...]

RECURRENT_DTYPE = "float32"
"""What transformers keeps recurrent states in, whatever the model's dtype."""


def keep_all(_fields: Fields) -> Coverage:
    """Every page of the prefix."""
    return Full()


def keep_snapshot(_fields: Fields) -> Coverage:
    """The snapshot at the page boundary."""
    return Checkpoint()


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of state: `tensors` is what a layer keeps, per token or per snapshot; none where it keeps nothing.

    `chunk` names the field that holds the tokens of a chunk, where a token sees its own chunk only.
    """

    pool: str
    tensors: Callable[[Fields], Tensors]
    coverage: Callable[[Fields], Coverage] = keep_all
    derived_from: str | None = None
    chunk: str | None = None


def keys_and_values(fields: Fields) -> Tensors:
    """K and V of shape [kv_heads, head_dim]."""
    heads = fields.count("num_attention_heads")
    shape = (fields.count_or("num_key_value_heads", heads), _head_dim(fields, heads))
    return TensorSpec("k", shape, fields.dtype), TensorSpec("v", shape, fields.dtype)


def latent(fields: Fields) -> Tensors:
    """What latent attention (MLA) keeps instead of K and V: [rank], and the part of the keys that turns, [rope_dim]."""
    return (
        TensorSpec("latent", (fields.count("kv_lora_rank"),), fields.dtype),
        TensorSpec("rope", (fields.count("qk_rope_head_dim"),), fields.dtype),
    )


def indexer_keys(fields: Fields) -> Tensors:
    """The key [dim] by which a layer picks the tokens it attends to; nothing where it takes an earlier layer's pick."""
    modes = fields.names("indexer_types")
    if modes is not None and fields.layer is not None and modes[fields.layer] == "shared":
        return ()
    return (TensorSpec("indexer", (fields.count("index_head_dim"),), fields.dtype),)


def gated_delta(fields: Fields) -> Tensors:
    """Gated delta net: `conv` [channels of q, k and v, width], `recurrent` [value heads, key dim, value dim]."""
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return _state(fields, channels, "linear_conv_kernel_dim", (value_heads, key_dim, value_dim))


def kimi_delta(fields: Fields) -> Tensors:
    """Kimi delta attention: `conv` [channels of q, k and v, width], `recurrent` [heads, head_dim, head_dim]."""
    heads, head_dim = fields.count("linear_num_heads"), fields.count("linear_head_dim")
    return _state(fields, 3 * heads * head_dim, "linear_conv_kernel_dim", (heads, head_dim, head_dim))


def short_conv(fields: Fields) -> Tensors:
    """A short convolution: `conv` [hidden_size, width]."""
    return (TensorSpec("conv", (fields.count("hidden_size"), fields.count("conv_L_cache")), fields.dtype),)


def mamba2(heads: str, head_dim: str, groups: str, state: str, width: str) -> Kind:
    """Mamba-2, given the names of its sizes: `conv` [channels, width], `recurrent` [heads, head_dim, state]."""

    def tensors(fields: Fields) -> Tensors:
        shape = (fields.count(heads), fields.count(head_dim), fields.count(state))
        channels = shape[0] * shape[1] + 2 * fields.count(groups) * shape[2]
        return _state(fields, channels, width, shape)

    return Kind("state", tensors, keep_snapshot)


def _state(fields: Fields, channels: int, width: str, recurrent: tuple[int, ...]) -> Tensors:
    return (
        TensorSpec("conv", (channels, fields.count(width)), fields.dtype),
        TensorSpec("recurrent", recurrent, RECURRENT_DTYPE),
    )


def _head_dim(fields: Fields, heads: int) -> int:
    if fields.get("head_dim") is not None:
        return fields.count("head_dim")
    return fields.divide(fields.count("hidden_size"), "hidden_size", heads, "heads", "give head_dim")


def _window(field: str) -> Callable[[Fields], Coverage]:
    def coverage(fields: Fields) -> Coverage:
        return Window(fields.count(field))

    return coverage


ATTENTION = Kind("kv", keys_and_values)
WINDOW = Kind("swa", keys_and_values, _window("sliding_window"))
CHUNKED = Kind("swa", keys_and_values, _window("attention_chunk_size"), chunk="attention_chunk_size")
LATENT = Kind("latent", latent)
INDEXER = Kind("indexer", indexer_keys, derived_from="latent")
GATED_DELTA = Kind("state", gated_delta, keep_snapshot)
KIMI_DELTA = Kind("state", kimi_delta, keep_snapshot)
SHORT_CONV = Kind("state", short_conv, keep_snapshot)
