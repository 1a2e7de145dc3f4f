"""How far a prefix can be resumed: what `coverage.longest_usable` says, without looking at every page."""

from collections.abc import Sequence

from hicache.tree.core import Core
from hicache.tree.node import Node
from hicache.tree.runs import HOLE_SIGN, Run, either, leading


def resumable(core: Core, node: Node, pages: int, any_tier: bool) -> int:
    """The most pages, up to `pages` of the prefix that ends in `node`, at which all loose pools can resume.

    Pools of full coverage are taken to be there up to `pages`. `any_tier`: count host copies as well.
    """
    if pages and _held_at_end(core, node, pages):
        return pages
    settled = -1
    while pages and pages != settled:
        settled = pages
        for pool, reach in core.loose:
            pages = _covered(core, node, pool, reach, pages, any_tier)
    return pages


def _held_at_end(core: Core, node: Node, pages: int) -> bool:
    """Whether the device copies in `node` alone are all that the loose pools need to resume at `pages`: often so."""
    stop = 4 * (pages - node.start)
    for pool, reach in core.loose:
        run = node.device[pool]
        first = stop - 4 * reach
        if run is None or first < 0 or len(run) < stop or HOLE_SIGN in run[first + 3 : stop : 4]:
            return False
    return True


def _covered(core: Core, node: Node, pool: int, reach: int, pages: int, any_tier: bool) -> int:
    """The most pages, up to `pages`, before which the pool has `reach` pages (or all there are) without a hole."""
    stop = low = pages
    while low > 0 and stop - low < reach:
        if node.start >= low:
            parent = node.parent
            if parent is None:
                return stop
            node = parent
            continue
        run = either(node.device[pool], node.host[pool]) if any_tier else node.device[pool]
        if run is None:
            stop = low = node.start
            continue
        first = max(0, stop - reach - node.start)
        hole = run[4 * first + 3 : 4 * (low - node.start) : 4].rfind(0xFF)
        if hole < 0:
            low = node.start + first
        else:
            stop = low = node.start + len(run[3 : 4 * (first + hole) : 4].rstrip(b"\xff"))
    return stop


def device_prefix(core: Core, path: Sequence[Node], pages: int) -> int:
    """How many pages of a path the pools of full coverage have on the device, from the root on."""
    lead = core.lead
    if lead is None:
        return pages
    block = core.block_bytes
    for node in path:
        if node.device_pages * block != len(node.key):
            return min(pages, node.start + leading(node.device[lead]))
    return pages


def any_prefix(core: Core, path: Sequence[Node], pages: int) -> int:
    """How many pages of a path the pools of full coverage have in either tier, from the root on."""
    lead = core.lead
    if lead is None or not core.holey:
        return pages
    for node in path:
        here = leading(either(node.device[lead], node.host[lead]))
        if here < core.size(node):
            return min(pages, node.start + here)
    return pages


def path_to(node: Node) -> list[Node]:
    """The nodes from below the root down to `node`."""
    path = []
    parent = node.parent
    while parent is not None:
        path.append(node)
        node, parent = parent, parent.parent
    path.reverse()
    return path


def known_path(core: Core, path: Sequence[Node], pages: int) -> list[Node]:
    """The nodes down to the last one of a matched path that is still in the tree and ends at or before page `pages`."""
    for node in reversed(path):
        if node.parent is not None and core.stop(node) <= pages:
            return path_to(node)
    return []


def last_boundary(core: Core, node: Node, pages: int) -> int:
    """The most pages, up to `pages` of the prefix that ends in `node`, that can be resumed from any tier."""
    if core.holey:
        pages = any_prefix(core, path_to(node), pages)
    return resumable(core, node, pages, True) if core.loose else pages


def presence(node: Node, pool: int) -> Run:
    """A run that has a slot where the pool has a copy in either tier."""
    return either(node.device[pool], node.host[pool])
