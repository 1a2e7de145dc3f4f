"""What cannot be supported is refused by name at start."""

from hicache.builder.build import breaker_options, build_kv_cache
from hicache.builder.describe import (
    ModelConfig,
    ModelDescription,
    PoolDescription,
    describe_model,
)
from hicache.builder.drafts import SidecarMemory, make_sidecar, maybe_register_hicache_draft, with_draft
from hicache.builder.entries import DevicePoolFactory
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
from hicache.builder.ranks import with_replicated
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
    "SidecarMemory",
    "attention_pool",
    "breaker_options",
    "build_kv_cache",
    "chunked_pool",
    "describe_model",
    "describe_sizes",
    "full_attention",
    "indexer_pool",
    "latent_pool",
    "make_sidecar",
    "maybe_register_hicache_draft",
    "split_sizes",
    "state_pool",
    "window_pool",
    "with_draft",
    "with_replicated",
]
