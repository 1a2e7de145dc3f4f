"""A page is there whole and checked, or it is not there."""

from hicache.storage.protocol import Buffers, ReadResult, StorageBackend, StorageKey, chain_keys

__all__ = [
    "Buffers",
    "ReadResult",
    "StorageBackend",
    "StorageKey",
    "chain_keys",
]
