"""A page takes a slot only where it has none and can be of use; all other slots are given back."""

from collections.abc import Mapping, Sequence

import numpy as np

from hicache.errors import InvariantError
from hicache.tree import runs
from hicache.tree.core import Core
from hicache.tree.freed import Freed
from hicache.tree.ledger import book_leaf, close_books, offer_loose, open_books, renew_use, tally_dirty, tally_loose
from hicache.tree.node import HOLEY, HOST, NO_CHILDREN, Node
from hicache.tree.reach import presence
from hicache.tree.runs import Run
from hicache.tree.shape import first_page, trim
from hicache.tree.walk import walk
from hicache.units import BoolArray, Int32Array, PoolName

Given = Sequence[Run]
"""Per pool, a run of slots offered for some pages, or None."""


class Taken:
    """Per pool: how many slots were taken, and those that were not."""

    __slots__ = ("added", "refused")

    def __init__(self, core: Core) -> None:
        self.added = [0] * len(core.pools)
        self.refused: list[list[bytes]] = [[] for _ in core.pools]

    def duplicates(self, core: Core) -> Mapping[PoolName, Int32Array]:
        """What was not taken, for the pools where that is anything."""
        found = {}
        for pool, pieces in enumerate(self.refused):
            if pieces:
                slots = runs.solid(pieces)
                if len(slots):
                    found[core.pools[pool].name] = slots
        return found


def given_runs(core: Core, by_name: Mapping[PoolName, Int32Array]) -> tuple[list[Run], int]:
    """The slots per pool number, and of how many pages they are. Raises InvariantError if lengths differ."""
    given: list[Run] = [None] * len(core.pools)
    pages = -1
    for name, slots in by_name.items():
        if pages not in (-1, len(slots)):
            raise InvariantError(f"runs differ in length: pool {name!r} has {len(slots)} pages, another {pages}")
        pages = len(slots)
        given[core.pool(name)] = runs.run_of(slots)
    return given, max(pages, 0)


def fill_node(core: Core, node: Node, tier: int, first: int, given: Given, taken: Taken) -> None:
    """Offers slots to a node: the runs given start at absolute page `first` and end inside the node.

    Pools of full coverage are taken at a page together or not at all; others only where their carriers are.
    """
    offset = first - node.start
    if core.full:
        there = node.host_pages if tier == HOST else node.device_pages
        if there * core.block_bytes == len(node.key):
            for pool in core.full:
                _refuse(taken, pool, given[pool])
        elif any(given[pool] is not None for pool in core.full):
            _fill_full(core, node, tier, offset, given, taken)
    for pool in core.carriers_first:
        run = given[pool]
        if run is not None and runs.or_none(run) is not None:
            _fill_loose(core, node, pool, tier, offset, run, taken)


def _refuse(taken: Taken, pool: int, run: Run) -> None:
    if run is not None:
        taken.refused[pool].append(run)


def _put(node: Node, tier: int, pool: int, run: Run) -> None:
    held = list(node.host if tier == HOST else node.device)
    held[pool] = run
    if tier == HOST:
        node.host = tuple(held)
    else:
        node.device = tuple(held)


def _fill_full(core: Core, node: Node, tier: int, offset: int, given: Given, taken: Taken) -> None:
    had_device = open_books(core, node)
    held = node.host if tier == HOST else node.device
    size = core.size(node)
    length = next(len(run) for pool in core.full if (run := given[pool]) is not None) // runs.SLOT_BYTES
    wanted = np.ones(length, np.bool_)
    for pool in core.full:
        there = runs.mask(held[pool], size)[offset : offset + length]
        wanted = wanted & (there | runs.mask(given[pool], length))
    for pool in core.full:
        _fill_pool(node, pool, tier, size, offset, given[pool], wanted, taken)
    close_books(core, node, had_device)


def _fill_loose(core: Core, node: Node, pool: int, tier: int, offset: int, run: bytes, taken: Taken) -> None:
    held = (node.host if tier == HOST else node.device)[pool]
    if held is not None and held[4 * offset + 3 : 4 * offset + len(run) : 4] == run[3::4]:
        taken.refused[pool].append(run)
        return
    size = core.size(node)
    length = len(run) // runs.SLOT_BYTES
    carried = np.ones(length, np.bool_)
    if node.flags & HOLEY or not core.carried_by_lead:
        for carrier in core.carriers[pool]:
            carried = carried & runs.mask(presence(node, carrier), size)[offset : offset + length]
    tally_loose(core, node, pool, -1)
    tally_dirty(core, node, pool, -1)
    _fill_pool(node, pool, tier, size, offset, run, carried, taken)
    tally_loose(core, node, pool, 1)
    tally_dirty(core, node, pool, 1)
    renew_use(core, node)
    offer_loose(core, node, pool)


def _fill_pool(
    node: Node, pool: int, tier: int, size: int, offset: int, given: Run, wanted: BoolArray, taken: Taken
) -> None:
    if given is None:
        return
    held = (node.host if tier == HOST else node.device)[pool]
    run, refused, added = runs.fill(held, size, offset, runs.array(given), wanted)
    if added:
        _put(node, tier, pool, run)
        taken.added[pool] += added
        node.account.held[2 * pool + tier] += added
    if len(refused):
        taken.refused[pool].append(refused.tobytes())


def insert(
    core: Core,
    root: Node,
    met: list[Node],
    blocks: bytes,
    first: int,
    given: Given,
    length: int,
    tier: int,
    taken: Taken,
) -> list[Node]:
    """Puts slots at pages `first` to `first` + `length` of a prefix, with new nodes as needed. Returns the path.

    `met`: nodes of the path, from the root down, that are known to be on it.
    """
    block = core.block_bytes
    stop = first + length
    limit = stop * block
    path, offset = walk(core, root, met, blocks, limit, True)
    known = offset // block
    for node in reversed(path):
        high = min(node.start + len(node.key) // block, stop)
        if high <= first:
            break
        low = max(first, node.start)
        fill_node(core, node, tier, low, part_of(given, low - first, high - first), taken)
    if known < stop:
        parent = path[-1] if path else root
        leaf = _add_leaf(core, parent, blocks[offset:limit], known, first, given, tier, taken)
        if leaf.parent is not None:
            path.append(leaf)
    elif path:
        core.clock += 1
        path[-1].tick = core.clock
    return path


def part_of(given: Given, low: int, high: int) -> list[Run]:
    """The runs of pages `low` to `high`, counted from where the given ones start."""
    return [None if run is None else run[4 * low : 4 * high] for run in given]


def _add_leaf(
    core: Core, parent: Node, key: bytes, start: int, first: int, given: Given, tier: int, taken: Taken
) -> Node:
    core.clock += 1
    node = Node(key, parent, start, core.clock, core.nothing, core.nothing, parent.account)
    core.nodes += 1
    if parent.children is NO_CHILDREN:
        parent.children = {}
    parent.children[first_page(core, node)] = node
    pages = len(key) // core.block_bytes
    low = max(first, start)
    mine = part_of(given, low - first, start + pages - first) if low > first else given
    if low == start and core.carried_by_lead and _is_whole(core, mine):
        held = tuple([None if run is None else runs.or_none(run) for run in mine])
        if tier == HOST:
            node.host = held
        else:
            node.device = held
        for pool, run in enumerate(held):
            added = pages if pool in core.full else runs.count(run)
            taken.added[pool] += added
            node.account.held[2 * pool + tier] += added
        book_leaf(core, node, tier, pages)
        return node
    close_books(core, node, False)
    fill_node(core, node, tier, low, mine, taken)
    trim(core, node, Freed(core))
    return node


def _is_whole(core: Core, given: Given) -> bool:
    """Whether the pools of full coverage are offered a slot at every page: then all slots can be of use."""
    for pool in core.full:
        run = given[pool]
        if run is None or runs.has_holes(run):
            return False
    return True


def attach(core: Core, node: Node, start: int, stop: int, tier: int, given: Given, taken: Taken) -> None:
    """Offers slots for pages `start` to `stop` of the prefix that ends in `node`; what has no node there is refused."""
    high = stop
    parent = node.parent
    while parent is not None and high > start:
        low = max(start, node.start)
        top = min(high, core.stop(node))
        if low < top:
            fill_node(core, node, tier, low, part_of(given, low - start, top - start), taken)
        if top < high:
            refuse(part_of(given, max(top, low) - start, high - start), taken)
        high = min(high, low)
        node, parent = parent, parent.parent
    if high > start:
        refuse(part_of(given, 0, high - start), taken)


def refuse(given: Given, taken: Taken) -> None:
    """Gives slots back."""
    for pool, run in enumerate(given):
        _refuse(taken, pool, run)
