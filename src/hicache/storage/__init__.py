"""A page is there whole and checked, or it is not there."""

from hicache.storage.breaker import BreakerOptions, BreakerState, BreakerStats
from hicache.storage.page_store import PageStore, PageStoreStats
from hicache.storage.protocol import Buffers, Cleared, ReadResult, StorageBackend, StorageKey, chain_keys
from hicache.storage.registry import BackendSpec, StoreLocation, backend_names, open_store, register_backend

__all__ = [
    "BackendSpec",
    "BreakerOptions",
    "BreakerState",
    "BreakerStats",
    "Buffers",
    "Cleared",
    "PageStore",
    "PageStoreStats",
    "ReadResult",
    "StorageBackend",
    "StorageKey",
    "StoreLocation",
    "backend_names",
    "chain_keys",
    "open_store",
    "register_backend",
]
