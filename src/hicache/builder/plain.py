"""Descriptions in a few lines, for engines that have no config: one function per kind of state."""

from collections.abc import Sequence

from hicache.builder.describe import ModelDescription, PoolDescription
from hicache.coverage import Checkpoint, Coverage, Full, Window
from hicache.layout import PoolGeometry, TensorSpec


def full_attention(layers: int, kv_heads: int, head_dim: int, dtype: str, page_size: int) -> ModelDescription:
    """A model of `layers` full-attention layers with K and V of shape [kv_heads, head_dim] per token each."""
    return ModelDescription(layers, (attention_pool(range(layers), kv_heads, head_dim, dtype, page_size),))


def attention_pool(layers: Sequence[int], kv_heads: int, head_dim: int, dtype: str, page_size: int) -> PoolDescription:
    """Pool `kv`: K and V of shape [kv_heads, head_dim] per token of the whole prefix, written by `layers`."""
    return _keys_and_values("kv", layers, (kv_heads, head_dim), dtype, page_size, Full(), None)


def window_pool(
    layers: Sequence[int], window_tokens: int, kv_heads: int, head_dim: int, dtype: str, page_size: int
) -> PoolDescription:
    """Pool `swa`: K and V; a token sees itself and the `window_tokens - 1` before it."""
    return _keys_and_values("swa", layers, (kv_heads, head_dim), dtype, page_size, Window(window_tokens), None)


def chunked_pool(
    layers: Sequence[int], chunk_tokens: int, kv_heads: int, head_dim: int, dtype: str, page_size: int
) -> PoolDescription:
    """Pool `swa`: K and V; a token sees those of its own chunk of `chunk_tokens` up to itself."""
    shape, coverage = (kv_heads, head_dim), Window(chunk_tokens)
    return _keys_and_values("swa", layers, shape, dtype, page_size, coverage, chunk_tokens)


def latent_pool(layers: Sequence[int], rank: int, rope_dim: int, dtype: str, page_size: int) -> PoolDescription:
    """Pool `latent`: [rank] and the turned part of the keys [rope_dim] per token (MLA)."""
    tensors = (TensorSpec("latent", (rank,), dtype), TensorSpec("rope", (rope_dim,), dtype))
    return PoolDescription("latent", PoolGeometry.uniform(len(layers), tensors, page_size), tuple(layers))


def indexer_pool(layers: Sequence[int], dim: int, dtype: str, page_size: int) -> PoolDescription:
    """Pool `indexer`: keys [dim] per token, at the slots of pool `latent`."""
    geometry = PoolGeometry.uniform(len(layers), (TensorSpec("indexer", (dim,), dtype),), page_size)
    return PoolDescription("indexer", geometry, tuple(layers), derived_from="latent")


def state_pool(layers: Sequence[int], tensors: Sequence[TensorSpec]) -> PoolDescription:
    """Pool `state`: per snapshot, the `tensors` of each of `layers`, such as `conv` and `recurrent`."""
    return PoolDescription("state", PoolGeometry.uniform(len(layers), tensors, 1), tuple(layers), Checkpoint())


def _keys_and_values(
    name: str,
    layers: Sequence[int],
    shape: tuple[int, int],
    dtype: str,
    page_size: int,
    coverage: Coverage,
    chunk_tokens: int | None,
) -> PoolDescription:
    tensors = (TensorSpec("k", shape, dtype), TensorSpec("v", shape, dtype))
    geometry = PoolGeometry.uniform(len(layers), tensors, page_size)
    return PoolDescription(name, geometry, tuple(layers), coverage, chunk_tokens=chunk_tokens)
