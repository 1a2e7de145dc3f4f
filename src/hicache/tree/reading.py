"""Slots are read as whole runs where nodes have them, page by page only where they don't."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from hicache.tree import marks, runs
from hicache.tree.core import Core
from hicache.tree.node import DEVICE, Node
from hicache.units import HOLE, Int32Array


def slots_up(core: Core, node: Node, pool: int, tier: int, start: int, stop: int) -> Int32Array:
    """The slots of pages `start` to `stop` of the prefix that ends in `node`, HOLE where there is none."""
    held: list[bytes] = []
    high = stop
    parent = node.parent
    while parent is not None and high > start:
        low = node.start
        if low < high:
            run = (node.device if tier == DEVICE else node.host)[pool]
            if run is None or 4 * (high - low) > len(run):
                return _sparse_slots(core, node, held, pool, tier, start, high)
            held.append(run[4 * max(0, start - low) : 4 * (high - low)])
            high = low
        node, parent = parent, parent.parent
    if high > start:
        held.append(runs.HOLE_RUN * (high - start))
    held.reverse()
    return runs.array(b"".join(held))


def _sparse_slots(
    core: Core, node: Node, below: list[bytes], pool: int, tier: int, start: int, stop: int
) -> Int32Array:
    """The slots up to page `stop` where nodes lack runs, joined with those `below`."""
    slots = np.full(stop - start, HOLE, np.int32)
    for piece, low, high in marks.pieces(core, node, start, stop):
        run = (piece.device, piece.host)[tier][pool]
        if run is not None:
            slots[low - start : high - start] = runs.array(run)[low - piece.start : high - piece.start]
    return runs.array(b"".join([slots.tobytes(), *reversed(below)]))


def joined_slots(path: Sequence[Node], pool: int, tier: int, stop: int) -> Int32Array | None:
    """The first `stop` slots of a path, if all its nodes have a run and are what they were when matched."""
    held = [node.device[pool] for node in path] if tier == DEVICE else [node.host[pool] for node in path]
    if not all(held):
        return None
    there = cast(list[bytes], held)
    joined = b"".join(there) if len(there) > 1 else there[0]
    whole = path[-1].start * 4 + len(there[-1])
    return np.frombuffer(joined, np.int32, stop) if len(joined) == whole and stop * 4 <= whole else None
