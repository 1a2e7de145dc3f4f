"""A slot is reused only after the transfer that touches it has settled, in every pool."""

from hicache.transfer.executor import Executor
from hicache.transfer.messages import (
    CLEARED,
    Backup,
    Clear,
    Completion,
    Delete,
    Event,
    Fetch,
    Load,
    Message,
    Query,
    Store,
    StoredPages,
)
from hicache.transfer.progress import LayerProgress
from hicache.transfer.threads import ThreadExecutor

__all__ = [
    "CLEARED",
    "Backup",
    "Clear",
    "Completion",
    "Delete",
    "Event",
    "Executor",
    "Fetch",
    "LayerProgress",
    "Load",
    "Message",
    "Query",
    "Store",
    "StoredPages",
    "ThreadExecutor",
]
