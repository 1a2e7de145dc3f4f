"""What cannot be supported is refused by name at start."""

from hicache.builder.build import DevicePoolFactory, build_kv_cache
from hicache.builder.describe import (
    ModelConfig,
    ModelDescription,
    PoolDescription,
    describe_model,
)
from hicache.builder.families import FAMILIES
from hicache.builder.plain import (
    attention_pool,
    chunked_pool,
    full_attention,
    indexer_pool,
    latent_pool,
    state_pool,
    window_pool,
)
from hicache.builder.refusals import REFUSED
from hicache.builder.sizes import PoolSizes, describe_sizes, split_sizes

__all__ = [
    "FAMILIES",
    "REFUSED",
    "DevicePoolFactory",
    "ModelConfig",
    "ModelDescription",
    "PoolDescription",
    "PoolSizes",
    "attention_pool",
    "build_kv_cache",
    "chunked_pool",
    "describe_model",
    "describe_sizes",
    "full_attention",
    "indexer_pool",
    "latent_pool",
    "split_sizes",
    "state_pool",
    "window_pool",
]
