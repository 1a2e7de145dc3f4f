"""What cannot be supported is refused by name at start."""

from hicache.builder.build import DevicePoolFactory, build_kv_cache, describe_sizes
from hicache.builder.describe import (
    ModelConfig,
    ModelDescription,
    PoolDescription,
    describe_model,
    full_attention,
)

__all__ = [
    "DevicePoolFactory",
    "ModelConfig",
    "ModelDescription",
    "PoolDescription",
    "build_kv_cache",
    "describe_model",
    "describe_sizes",
    "full_attention",
]
