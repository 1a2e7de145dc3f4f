"""A cache for what an LLM has already computed, over device memory, host memory and storage.

Names are loaded when they are first used: importing hicache is quick and pulls in no engine, server or backend.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hicache.builder import build_kv_cache as build_kv_cache
    from hicache.builder import maybe_register_hicache_draft as maybe_register_hicache_draft
    from hicache.cache import Cache as Cache
    from hicache.cache import Flushed as Flushed
    from hicache.cache import Imported as Imported
    from hicache.cache import Quota as Quota
    from hicache.cache import Retracted as Retracted
    from hicache.cache import SidecarPoolSpec as SidecarPoolSpec
    from hicache.cache import UnifiedRadixCache as UnifiedRadixCache
    from hicache.config import CacheConfig as CacheConfig
    from hicache.controller import DistributedAgree as DistributedAgree
    from hicache.controller import HybridCacheController as HybridCacheController
    from hicache.controller import Place as Place
    from hicache.coverage import Checkpoint as Checkpoint
    from hicache.coverage import Coverage as Coverage
    from hicache.coverage import Full as Full
    from hicache.coverage import Window as Window
    from hicache.errors import CacheError as CacheError
    from hicache.errors import CapacityError as CapacityError
    from hicache.errors import ClosedError as ClosedError
    from hicache.errors import ConfigError as ConfigError
    from hicache.errors import InUseError as InUseError
    from hicache.errors import InvariantError as InvariantError
    from hicache.errors import QueueFullError as QueueFullError
    from hicache.errors import RankError as RankError
    from hicache.errors import StorageError as StorageError
    from hicache.errors import TransferError as TransferError
    from hicache.keys import Namespace as Namespace
    from hicache.pools import HostPoolGroup as HostPoolGroup
    from hicache.pools import PoolEntry as PoolEntry
    from hicache.pools import PoolTransfer as PoolTransfer
    from hicache.units import Tier as Tier
else:
    _MODULE_OF: Final = {
        "build_kv_cache": "hicache.builder",
        "maybe_register_hicache_draft": "hicache.builder",
        "Cache": "hicache.cache",
        "Flushed": "hicache.cache",
        "Imported": "hicache.cache",
        "Quota": "hicache.cache",
        "Retracted": "hicache.cache",
        "SidecarPoolSpec": "hicache.cache",
        "UnifiedRadixCache": "hicache.cache",
        "CacheConfig": "hicache.config",
        "DistributedAgree": "hicache.controller",
        "HybridCacheController": "hicache.controller",
        "Place": "hicache.controller",
        "Checkpoint": "hicache.coverage",
        "Coverage": "hicache.coverage",
        "Full": "hicache.coverage",
        "Window": "hicache.coverage",
        "CacheError": "hicache.errors",
        "CapacityError": "hicache.errors",
        "ClosedError": "hicache.errors",
        "ConfigError": "hicache.errors",
        "InUseError": "hicache.errors",
        "InvariantError": "hicache.errors",
        "QueueFullError": "hicache.errors",
        "RankError": "hicache.errors",
        "StorageError": "hicache.errors",
        "TransferError": "hicache.errors",
        "Namespace": "hicache.keys",
        "HostPoolGroup": "hicache.pools",
        "PoolEntry": "hicache.pools",
        "PoolTransfer": "hicache.pools",
        "Tier": "hicache.units",
    }
    __all__ = ["__version__", *_MODULE_OF]

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'hicache' has no attribute {name!r}")
        exported = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return exported

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
