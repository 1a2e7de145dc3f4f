"""Row copies between arrays of one row shape: whole runs at once where rows follow each other on both sides."""

import numpy as np

from hicache.units import ByteArray, Int32Array

_RUNS_FROM_ROW_BYTES = 1024
"""From this row size on, a slice per run is quicker than indexing with arrays."""


def copy_rows(target: ByteArray, target_rows: Int32Array, source: ByteArray, source_rows: Int32Array) -> None:
    """Copies source[source_rows[i]] to target[target_rows[i]]; both are uint8 of any rank, rows of one shape."""
    if len(target_rows) == 0:
        return
    breaks = np.flatnonzero((np.diff(target_rows) != 1) | (np.diff(source_rows) != 1)) + 1
    row_bytes = source[0].nbytes
    if len(breaks) * 8 > len(target_rows) and row_bytes < _RUNS_FROM_ROW_BYTES:
        target[target_rows] = source[source_rows]
        return
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), len(target_rows)]
    targets = target_rows[starts].tolist()
    sources = source_rows[starts].tolist()
    for start, stop, to, at in zip(starts, stops, targets, sources, strict=True):
        count = stop - start
        target[to : to + count] = source[at : at + count]
