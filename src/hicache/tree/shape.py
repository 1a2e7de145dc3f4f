"""Splitting, trimming and removing nodes: a suffix keeps its node; a leaf without residency and pins is removed."""

from hicache.tree import runs
from hicache.tree.core import Core
from hicache.tree.freed import Freed
from hicache.tree.ledger import (
    LAST_PAGE,
    PINS_PER_POOL,
    book_split,
    close_books,
    loose_mask,
    lower_here,
    offer,
    open_books,
    renew_use,
    tell_parents,
)
from hicache.tree.node import DEVICE, HELD, HOLEY, HOST, NO_CHILDREN, STRAY, USELESS, Node
from hicache.tree.runs import Run
from hicache.units import BoolArray

KEY_BYTES = 32


def split(core: Core, node: Node, at: int) -> Node:
    """Cuts a node before absolute page `at`, inside it. Returns the new node, which holds the pages before.

    The suffix keeps the node and what is pinned at its end; the prefix is pinned as whole nodes are.
    """
    parent = node.parent
    assert parent is not None
    if node.flags & HELD:
        node.flags &= ~HELD
        lower_here(core, node)
    simple = node.pins is None and not node.some
    had_device = not simple and open_books(core, node)
    pages = at - node.start
    block = core.block_bytes
    head = Node(
        node.key[: pages * block],
        parent,
        node.start,
        node.tick,
        _heads(node.device, pages),
        _heads(node.host, pages),
        node.account,
    )
    core.nodes += 1
    parent.children[first_page(core, head)] = head
    node.key = node.key[pages * block :]
    node.start = at
    node.parent = head
    node.device = _tails(node.device, pages)
    node.host = _tails(node.host, pages)
    head.children = {first_page(core, node): node}
    head.born = node.born
    head.hits = node.hits
    head.here = 1 if node.here else 0
    head.some = 1 if node.some else 0
    if core.stateful is not None:
        core.stateful.split(node, head)
    _split_marks(node, head, pages)
    head.flags = node.flags & STRAY
    if simple:
        book_split(core, node, head)
        return head
    if node.flags & HOLEY:
        node.flags &= ~HOLEY
        core.holey -= 1
    if core.lead is not None:
        node.device_pages = runs.count(node.device[core.lead])
    still_has_device = node.device_pages > 0 or node.below > 0
    head.below = 1 if still_has_device else 0
    close_books(core, head, had_device)
    close_books(core, node, still_has_device)
    return head


def first_page(core: Core, node: Node) -> bytes:
    """The first page of a node's key: its place among its parent's children. The key itself, if that is one page."""
    key = node.key
    return key if len(key) == core.block_bytes else key[: core.block_bytes]


def _heads(held: tuple[Run, ...], pages: int) -> tuple[Run, ...]:
    return tuple([None if run is None else runs.or_none(run[: 4 * pages]) for run in held])


def _tails(held: tuple[Run, ...], pages: int) -> tuple[Run, ...]:
    return tuple([None if run is None else runs.or_none(run[4 * pages :]) for run in held])


def _split_marks(node: Node, head: Node, pages: int) -> None:
    if node.pins is not None:
        whole = [0 if place % PINS_PER_POOL >= LAST_PAGE else count for place, count in enumerate(node.pins)]
        head.pins = whole if any(whole) else None
    if node.keys is not None:
        head.keys, node.keys = node.keys[: pages * KEY_BYTES], node.keys[pages * KEY_BYTES :]
    if node.stored is not None:
        head.stored = {pool: (epoch, marks[:pages]) for pool, (epoch, marks) in node.stored.items()}
        node.stored = {pool: (epoch, marks[pages:]) for pool, (epoch, marks) in node.stored.items()}


def pinned(node: Node) -> bool:
    """Whether anything pins the node, or a page below it."""
    return node.here > 0 or node.some > 0 or node.pins is not None


def remove(core: Core, node: Node, freed: Freed) -> None:
    """Removes an unpinned leaf with all it holds, and the parents that have nothing and no child any more."""
    parent = _unlink(core, node, freed)
    while parent.parent is not None and not parent.children and not pinned(parent):
        if resident_end(core, parent):
            break
        parent = _unlink(core, parent, freed)
    if parent.parent is not None:
        became_leaf(core, parent, freed)
    elif not parent.children and parent.keys is not None:
        core.roots.pop(parent.keys, None)


def became_leaf(core: Core, node: Node, freed: Freed) -> None:
    """After a node lost its last child, if it did: cuts off what is empty at its end, and queues it."""
    if not node.children and not pinned(node):
        end = resident_end(core, node)
        if end < core.size(node):
            _cut(core, node, end, freed)
            return
    renew_use(core, node)
    offer(core, node)


def resident_end(core: Core, node: Node) -> int:
    """One past the node's last page that any pool has in any tier."""
    if core.lead is not None and not node.flags & HOLEY:
        return core.size(node)
    return max(runs.end(run) for held in (node.device, node.host) for run in held)


def _unlink(core: Core, node: Node, freed: Freed) -> Node:
    parent = node.parent
    assert parent is not None
    had_device = open_books(core, node)
    freed.add_all(node)
    node.device = node.host = core.nothing
    node.device_pages = node.host_pages = node.double_pages = 0
    if node.flags & HOLEY:
        core.holey -= 1
    node.flags = 0
    core.nodes -= 1
    if had_device:
        tell_parents(core, node, -1)
    del parent.children[first_page(core, node)]
    if not parent.children:
        parent.children = NO_CHILDREN
    node.parent = None
    if node.tick > parent.tick:
        parent.tick = node.tick
    if core.stateful is not None:
        core.stateful.gone(node)
    return parent


def truncate(core: Core, node: Node, at: int, freed: Freed) -> None:
    """Takes away, in all tiers and pools, everything below an unpinned node and its own pages from absolute `at` on."""
    below = [node]
    for parent in below:
        below.extend(parent.children.values())
    for child in reversed(below[1:]):
        _unlink(core, child, freed)
    pages = at - node.start
    if pages <= 0:
        remove(core, node, freed)
    elif pages < core.size(node):
        _cut(core, node, pages, freed)
    elif len(below) > 1:
        became_leaf(core, node, freed)


def _cut(core: Core, node: Node, pages: int, freed: Freed) -> None:
    had_device = open_books(core, node)
    for tier, held in ((DEVICE, node.device), (HOST, node.host)):
        for pool, run in enumerate(held):
            if run is not None:
                freed.add(node, tier, pool, run[4 * pages :])
    node.key = node.key[: pages * core.block_bytes]
    node.device = _heads(node.device, pages)
    node.host = _heads(node.host, pages)
    if node.keys is not None:
        node.keys = node.keys[: pages * KEY_BYTES]
    if node.stored is not None:
        node.stored = {pool: (epoch, marks[:pages]) for pool, (epoch, marks) in node.stored.items()}
    if core.stateful is not None:
        core.stateful.shrunk(node)
    parent = node.parent
    if parent is not None and pages == 1:
        del parent.children[node.key]
        parent.children[node.key] = node
    close_books(core, node, had_device)


def trim(core: Core, node: Node, freed: Freed) -> None:
    """Cuts off an unpinned leaf's last pages that have nothing, all of them if all have nothing."""
    if node.parent is None or node.children or pinned(node):
        return
    end = resident_end(core, node)
    if end < core.size(node):
        truncate(core, node, node.start + end, freed)


def drop(core: Core, node: Node, pool: int, tier: int, gone: BoolArray, freed: Freed) -> None:
    """Takes the pages of `gone` (bool per page of the node) out of a tier: those of `pool`'s whole class.

    Where that was the last copy, unpinned copies of the pools that are of no use without it go along, in both tiers.
    """
    had_device = open_books(core, node)
    size = core.size(node)
    first = core.members(pool)[0]
    before = runs.mask(node.device[first], size) | runs.mask(node.host[first], size)
    for member in core.members(pool):
        _punch(node, member, tier, gone, freed)
    lost = before & ~(runs.mask(node.device[first], size) | runs.mask(node.host[first], size))
    if lost.any():
        for dependent in core.dependents[first]:
            for other in (DEVICE, HOST):
                _punch(node, dependent, other, lost & loose_mask(core, node, dependent, other), freed)
        if node.pins is not None:
            node.flags |= STRAY
    close_books(core, node, had_device)
    if lost.any():
        _renew_below(core, node, pool, node.start + int(lost.nonzero()[0][-1]))
        _offer_parents(core, node)
    trim(core, node, freed)


def _offer_parents(core: Core, node: Node) -> None:
    """A parent's last copies may go once nothing of full coverage is below it."""
    while not (node.device_pages or node.host_pages) and node.parent is not None and node.parent.parent is not None:
        node = node.parent
        offer(core, node)


def _punch(node: Node, pool: int, tier: int, gone: BoolArray, freed: Freed) -> None:
    held = list(node.host if tier == HOST else node.device)
    run = held[pool]
    if run is None:
        return
    held[pool], taken = runs.punch(run, gone)
    if taken:
        freed.add(node, tier, pool, taken)
    if tier == HOST:
        node.host = tuple(held)
    else:
        node.device = tuple(held)


def _renew_below(core: Core, node: Node, pool: int, page: int) -> None:
    """After the last copy of a page went: leaves below that could be resumed only with it are of less use."""
    reach = dict(core.loose).get(pool)
    pending = list(node.children.values())
    while pending:
        child = pending.pop()
        if reach is not None and child.start >= page + reach:
            continue
        pending.extend(child.children.values())
        if not child.children:
            renew_use(core, child)
            if child.flags & USELESS:
                offer(core, child)
