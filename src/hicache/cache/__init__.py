"""The only door that engines use."""

from hicache.cache.load import Load
from hicache.cache.match import Match
from hicache.cache.prefixes import Export, Imported
from hicache.cache.quotas import Quota
from hicache.cache.registration import SidecarPoolSpec
from hicache.cache.retraction import Retracted
from hicache.cache.stats import CacheStats, PoolStats
from hicache.cache.unified import UnifiedRadixCache
from hicache.controller import Flush, Flushed

Cache = UnifiedRadixCache

__all__ = [
    "Cache",
    "CacheStats",
    "Export",
    "Flush",
    "Flushed",
    "Imported",
    "Load",
    "Match",
    "PoolStats",
    "Quota",
    "Retracted",
    "SidecarPoolSpec",
    "UnifiedRadixCache",
]
