"""A page takes a slot only where it has none and can be of use; all other slots are given back."""

from collections.abc import Mapping, Sequence

import numpy as np

from hicache.errors import InvariantError
from hicache.tree import runs
from hicache.tree.core import Core
from hicache.tree.freed import Freed
from hicache.tree.ledger import book_leaf, close_books, open_books
from hicache.tree.node import HOST, NO_CHILDREN, Node
from hicache.tree.reach import presence
from hicache.tree.runs import Run
from hicache.tree.shape import first_page, trim
from hicache.tree.walk import walk
from hicache.units import BoolArray, Int32Array, PoolName

Given = Sequence[Int32Array | None]
"""Per pool, the slots offered for some pages, or None."""


class Taken:
    """Per pool: how many slots were taken, and those that were not."""

    __slots__ = ("added", "refused")

    def __init__(self, core: Core) -> None:
        self.added = [0] * len(core.pools)
        self.refused: list[list[Int32Array]] = [[] for _ in core.pools]

    def refuse(self, pool: int, slots: Int32Array) -> None:
        """Slots (HOLE allowed) that stay the caller's."""
        if len(slots):
            self.refused[pool].append(slots[slots >= 0])

    def duplicates(self, core: Core) -> Mapping[PoolName, Int32Array]:
        """What was not taken, for the pools where that is anything."""
        found = {}
        for pool, pieces in enumerate(self.refused):
            if pieces:
                slots = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
                if len(slots):
                    found[core.pools[pool].name] = slots
        return found


def given_runs(core: Core, by_name: Mapping[PoolName, Int32Array]) -> tuple[list[Int32Array | None], int]:
    """The slots per pool number, and of how many pages they are. Raises InvariantError if lengths differ."""
    given: list[Int32Array | None] = [None] * len(core.pools)
    pages = -1
    for name, slots in by_name.items():
        if pages not in (-1, len(slots)):
            raise InvariantError(f"runs differ in length: pool {name!r} has {len(slots)} pages, another {pages}")
        pages = len(slots)
        given[core.pool(name)] = np.ascontiguousarray(slots, np.int32)
    return given, max(pages, 0)


def fill_node(core: Core, node: Node, tier: int, first: int, given: Given, taken: Taken) -> None:
    """Offers slots to a node: `given[pool][i]` for absolute page `first` + i, all of them inside the node.

    Pools of full coverage are taken at a page together or not at all; others only where their carriers are.
    """
    had_device = open_books(core, node)
    size = core.size(node)
    offset = first - node.start
    length = max((len(slots) for slots in given if slots is not None), default=0)
    held = list(node.host if tier == HOST else node.device)
    wanted = _whole(held, core.full, size, offset, length, given)
    for pool in core.full:
        _fill_pool(held, pool, size, offset, given[pool], wanted, taken)
    _put(node, tier, held)
    for pool in sorted((pool for pool, _ in core.loose), key=lambda pool: len(core.dependents[pool]), reverse=True):
        carried = np.ones(length, np.bool_)
        for carrier in core.carriers[pool]:
            carried = carried & runs.mask(presence(node, carrier), size)[offset : offset + length]
        _fill_pool(held, pool, size, offset, given[pool], carried, taken)
        _put(node, tier, held)
    close_books(core, node, had_device)


def _put(node: Node, tier: int, held: list[Run]) -> None:
    if tier == HOST:
        node.host = tuple(held)
    else:
        node.device = tuple(held)


def _whole(held: list[Run], full: tuple[int, ...], size: int, offset: int, length: int, given: Given) -> BoolArray:
    """Where all pools of full coverage have a slot or are offered one."""
    whole = np.ones(length, np.bool_)
    for pool in full:
        there = runs.mask(held[pool], size)[offset : offset + length]
        slots = given[pool]
        whole = whole & (there if slots is None else there | (slots >= 0))
    return whole


def _fill_pool(
    held: list[Run],
    pool: int,
    size: int,
    offset: int,
    slots: Int32Array | None,
    wanted: BoolArray,
    taken: Taken,
) -> None:
    if slots is None:
        return
    held[pool], refused, added = runs.fill(held[pool], size, offset, slots, wanted)
    taken.added[pool] += added
    taken.refuse(pool, refused)


def insert(
    core: Core, root: Node, blocks: bytes, first: int, given: Given, length: int, tier: int, taken: Taken
) -> list[Node]:
    """Puts slots at pages `first` to `first` + `length` of a prefix, with new nodes as needed. Returns the path."""
    limit = (first + length) * core.block_bytes
    path, offset = walk(core, root, blocks, limit, True)
    known = offset // core.block_bytes
    for node in path:
        low, high = max(first, node.start), min(core.stop(node), first + length)
        if low < high:
            fill_node(core, node, tier, low, _part(given, low - first, high - first), taken)
    if known < first + length:
        parent = path[-1] if path else root
        leaf = _add_leaf(core, parent, blocks[offset:limit], known, first, given, tier, taken)
        if leaf.parent is not None:
            path.append(leaf)
    return path


def _part(given: Given, low: int, high: int) -> Given:
    return [None if slots is None else slots[low:high] for slots in given]


def _add_leaf(
    core: Core, parent: Node, key: bytes, start: int, first: int, given: Given, tier: int, taken: Taken
) -> Node:
    core.clock += 1
    node = Node(key, parent, start, core.clock, core.nothing, core.nothing)
    core.nodes += 1
    if parent.children is NO_CHILDREN:
        parent.children = {}
    parent.children[first_page(core, node)] = node
    low = max(first, start)
    if low == start and core.carried_by_lead:
        held = _whole_leaf(core, given, start - first)
        if held is not None:
            if tier == HOST:
                node.host = held
            else:
                node.device = held
            pages = len(key) // core.block_bytes
            for pool, run in enumerate(held):
                taken.added[pool] += pages if pool in core.full else runs.count(run)
            book_leaf(core, node, tier, pages)
            return node
    fill_node(core, node, tier, low, _part(given, low - first, core.stop(node) - first), taken)
    trim(core, node, Freed(core))
    return node


def _whole_leaf(core: Core, given: Given, offset: int) -> tuple[Run, ...] | None:
    """The runs of a new leaf, if pools of full coverage have a slot for each of its pages: then all slots are taken."""
    held = [None if slots is None else slots[offset:].tobytes() for slots in given]
    for pool in core.full:
        run = held[pool]
        if run is None or runs.has_holes(run):
            return None
    for pool, _ in core.loose:
        run = held[pool]
        held[pool] = None if run is None else runs.or_none(run)
    return tuple(held)


def attach(core: Core, node: Node, start: int, stop: int, tier: int, given: Given, taken: Taken) -> None:
    """Offers slots for pages `start` to `stop` of the prefix that ends in `node`; what has no node there is refused."""
    high = stop
    parent = node.parent
    while parent is not None and high > start:
        low = max(start, node.start)
        top = min(high, core.stop(node))
        if low < top:
            fill_node(core, node, tier, low, _part(given, low - start, top - start), taken)
        if top < high:
            refuse(core, _part(given, max(top, low) - start, high - start), taken)
        high = min(high, low)
        node, parent = parent, parent.parent
    if high > start:
        refuse(core, _part(given, 0, high - start), taken)


def refuse(core: Core, given: Given, taken: Taken) -> None:
    """Gives slots back."""
    for pool, slots in enumerate(given):
        if slots is not None:
            taken.refuse(pool, slots)
