"""What a node knows beside residency: its tokens, its page keys once they were asked for, and what is stored of it."""

from collections.abc import Iterator

import numpy as np

from hicache.keys import page_keys
from hicache.tree.core import Core
from hicache.tree.node import Node
from hicache.tree.shape import KEY_BYTES
from hicache.units import BoolArray


def pieces(core: Core, node: Node, start: int, stop: int) -> list[tuple[Node, int, int]]:
    """Pages `start` to `stop` of the prefix that ends in `node`: nodes and absolute pages, from the root down.

    Pages that have no node any more are left out.
    """
    found = []
    parent = node.parent
    while parent is not None and stop > start:
        low, high = max(start, node.start), min(stop, core.stop(node))
        if low < high:
            found.append((node, low, high))
        node, parent = parent, parent.parent
        stop = min(stop, low)
    found.reverse()
    return found


def ensure_keys(core: Core, node: Node) -> bytes:
    """The page keys of a node, 32 bytes each; computed with those above it that are missing."""
    missing = []
    while node.keys is None:
        missing.append(node)
        if node.parent is None:
            return b""
        node = node.parent
    keys = node.keys
    for below in reversed(missing):
        keys = page_keys(keys[-KEY_BYTES:], below.key, core.page_size + core.lookahead_tokens)
        below.keys = keys
    return keys


def tokens_of(core: Core, node: Node, low: int, high: int) -> bytes:
    """The tokens of absolute pages `low` to `high` of a node, little-endian uint32, without lookahead."""
    block = core.block_bytes
    run = node.key[(low - node.start) * block : (high - node.start) * block]
    if not core.lookahead_tokens:
        return run
    return np.frombuffer(run, np.uint32).reshape(high - low, -1)[:, : core.page_size].tobytes()


def set_stored(
    core: Core, node: Node, low: int, high: int, pool: int, epoch: int, pages: BoolArray, value: int
) -> None:
    """Marks the absolute pages `low` to `high` where `pages` says so; marks of another attachment are forgotten."""
    size = core.size(node)
    table = {} if node.stored is None else dict(node.stored)
    old_epoch, old = table.get(pool, (epoch, bytes(size)))
    marks = np.zeros(size, np.uint8) if old_epoch != epoch else np.frombuffer(old, np.uint8).copy()
    marks[low - node.start : high - node.start][pages] = value
    table[pool] = (epoch, marks.tobytes())
    node.stored = table


def get_stored(node: Node, low: int, high: int, pool: int, epoch: int) -> BoolArray:
    """Which of the absolute pages `low` to `high` of a node are marked for this attachment."""
    entry = None if node.stored is None else node.stored.get(pool)
    if entry is None or entry[0] != epoch:
        return np.zeros(high - low, np.bool_)
    return np.frombuffer(entry[1], np.bool_)[low - node.start : high - node.start]


def masked_pieces(
    core: Core, node: Node, start: int, stop: int, pages: BoolArray | None
) -> Iterator[tuple[Node, int, int, BoolArray]]:
    """The pieces of a span with each one's part of a mask over the span; all True without one."""
    for piece, low, high in pieces(core, node, start, stop):
        part = np.ones(high - low, np.bool_) if pages is None else pages[low - start : high - start]
        yield piece, low, high, part
