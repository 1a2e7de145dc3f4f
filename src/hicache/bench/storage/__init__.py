"""Stores are measured from host pages and back, next to plain writes and reads of the same bytes on the same disk."""

from hicache.bench.storage.run import PAGE_SIZES, Options, run
from hicache.bench.storage.table import table

__all__ = ["PAGE_SIZES", "Options", "run", "table"]
