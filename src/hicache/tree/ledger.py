"""A node changes between `open_books` and `close_books`; after that counters, holds and queues are right."""

import numpy as np

from hicache.tree import runs
from hicache.tree.core import CLEAN, DIRTY, DUPLICATE, ONLY, QUEUES_PER_POOL, USELESS_DEVICE, USELESS_HOST, Core
from hicache.tree.node import DEVICE, HELD, HOLEY, HOST, QUEUED, USELESS, Node
from hicache.tree.reach import last_boundary
from hicache.tree.runs import Run
from hicache.units import BoolArray

PIN_HERE = 0
PIN_SOMEWHERE = 1
PIN_HOST = 2
LAST_PAGE = 3
"""Added to a kind: only the node's last page is pinned."""
PINS_PER_POOL = 6

ON_DEVICE = QUEUED << DIRTY
ON_HOST = QUEUED << ONLY
IN_BOTH = QUEUED << CLEAN | QUEUED << DUPLICATE | ON_DEVICE | ON_HOST
"""Flags of the first pool's queues that a node may have to be in, by the tiers that have something of it."""


def open_books(core: Core, node: Node) -> bool:
    """Takes a node's share out of the counters. Returns what `close_books` needs."""
    _tally(core, node, -1)
    return node.device_pages > 0 or node.below > 0


def close_books(core: Core, node: Node, had_device: bool) -> None:
    """Counts a node again after a change, and queues it where it may be evicted from."""
    lead = core.lead
    if lead is not None:
        _recount(core, node, lead)
    _tally(core, node, 1)
    has_device = node.device_pages > 0 or node.below > 0
    if has_device != had_device:
        tell_parents(core, node, 1 if has_device else -1)
    if node.some or node.flags & HELD:
        renew_hold(core, node)
    renew_use(core, node)
    offer(core, node)


def book_leaf(core: Core, node: Node, tier: int, pages: int) -> None:
    """Counts and queues a new, unpinned leaf in which pools of full coverage have all `pages` pages in one tier."""
    lead = core.main
    if tier == DEVICE:
        node.device_pages = pages
        tell_parents(core, node, 1)
    else:
        node.host_pages = pages
    free = node.account.free
    free[2 * lead + tier] += pages
    kind = DIRTY if tier == DEVICE else ONLY
    dirty = 1 if tier == DEVICE else 0
    core.dirty[lead] += dirty * pages
    push = node.account.queues.push
    push(QUEUES_PER_POOL * lead + kind, node)
    held = node.device if tier == DEVICE else node.host
    for pool, _ in core.loose:
        run = held[pool]
        if run is not None:
            count = runs.count(run)
            free[2 * pool + tier] += count
            core.dirty[pool] += dirty * count
            push(QUEUES_PER_POOL * pool + kind, node)
    if core.loose or core.holey:
        renew_use(core, node)
        if node.flags & USELESS:
            offer(core, node)


def book_split(core: Core, node: Node, head: Node) -> None:
    """Counts and queues the two parts of a node that was split, and that single pools don't pin.

    What may be evicted is the same in sum: both parts are pinned, or not, as the whole was.
    """
    lead = core.lead
    if lead is not None:
        if node.flags & HOLEY:
            node.flags &= ~HOLEY
            core.holey -= 1
        _recount(core, node, lead)
        _recount(core, head, lead)
        head.below = 1 if node.device_pages or node.below else 0
    offer(core, head)


def book_device_loss(core: Core, node: Node, left: tuple[Run, ...]) -> None:
    """Takes all device pages of full coverage from an unpinned node, where each has a host copy; `left` stays."""
    lead = core.main
    free = node.account.free
    free[2 * lead] -= node.device_pages
    free[2 * lead + HOST] -= host_free(core, node)
    node.device = left
    node.device_pages = node.double_pages = 0
    free[2 * lead + HOST] += host_free(core, node)
    if not node.below:
        tell_parents(core, node, -1)
    _offer_lead(core, node, lead)


def _recount(core: Core, node: Node, lead: int) -> None:
    device, host = node.device[lead], node.host[lead]
    size = len(node.key) // core.block_bytes
    node.device_pages = runs.count(device)
    node.host_pages = runs.count(host)
    if node.device_pages == size:
        node.double_pages = node.host_pages
        covered = size
    elif node.host_pages == size:
        node.double_pages = node.device_pages
        covered = size
    else:
        node.double_pages = runs.both(device, host)
        covered = node.device_pages + node.host_pages - node.double_pages
    if (covered < size) != bool(node.flags & HOLEY):
        node.flags ^= HOLEY
        core.holey += 1 if covered < size else -1


def _tally(core: Core, node: Node, sign: int) -> None:
    free = node.account.free
    lead = core.lead
    if lead is not None:
        if node.device_pages:
            core.dirty[lead] += sign * (node.device_pages - node.double_pages)
            if not node.here:
                free[2 * lead] += sign * node.device_pages
        if node.host_pages:
            free[2 * lead + HOST] += sign * host_free(core, node)
    for pool, _ in core.loose:
        tally_loose(core, node, pool, sign)
        tally_dirty(core, node, pool, sign)


def tally_dirty(core: Core, node: Node, pool: int, sign: int) -> None:
    """Adds a node's device pages of a loose pool that have no host copy to the counters, or takes them out."""
    device = node.device[pool]
    if device is not None:
        core.dirty[pool] += sign * (runs.count(device) - runs.both(device, node.host[pool]))


def tally_loose(core: Core, node: Node, pool: int, sign: int) -> None:
    """Adds a node's share of a loose pool's evictable slots to the counters, or takes it out (`sign` -1)."""
    if node.device[pool] is not None:
        node.account.free[2 * pool] += sign * loose_free(core, node, pool, DEVICE)
    if node.host[pool] is not None:
        node.account.free[2 * pool + HOST] += sign * loose_free(core, node, pool, HOST)


def loose_free(core: Core, node: Node, pool: int, tier: int) -> int:
    """How many pages of a loose pool may leave a tier now."""
    run = node.device[pool] if tier == DEVICE else node.host[pool]
    pins = node.pins
    if run is None:
        return 0
    if pins is None:
        return runs.count(run)
    at = PINS_PER_POOL * pool
    own = at + (PIN_HERE if tier == DEVICE else PIN_HOST)
    if pins[own]:
        return 0
    if any(pins[at : at + PINS_PER_POOL]):
        return int(np.count_nonzero(loose_mask(core, node, pool, tier)))
    return runs.count(run)


def host_free(core: Core, node: Node) -> int:
    """How many host pages of full coverage can go from a node, once what is below it has gone."""
    lead = core.lead
    if lead is None or not node.host_pages or (node.pins is not None and host_pinned(node, lead)):
        return 0
    double = node.double_pages
    if double == node.host_pages or node.here or node.some or node.below:
        return double
    device, host = node.device[lead], node.host[lead]
    if device is None or host is None:
        return node.host_pages
    return double + runs.count(host[4 * runs.end(device) :])


def host_pinned(node: Node, pool: int) -> bool:
    """Whether all host copies of a pool in a node are pinned."""
    return node.pins is not None and node.pins[PINS_PER_POOL * pool + PIN_HOST] > 0


def loose_mask(core: Core, node: Node, pool: int, tier: int) -> BoolArray:
    """Which pages of a loose pool may leave a tier now; bool per page. Whatever pins a page keeps its last copy."""
    size = core.size(node)
    here = runs.mask((node.device, node.host)[tier][pool], size)
    pins = node.pins
    if pins is None:
        return here
    at = PINS_PER_POOL * pool
    own = at + (PIN_HERE if tier == DEVICE else PIN_HOST)
    if pins[own]:
        return here & False
    other = runs.mask((node.host, node.device)[tier][pool], size)
    if any(pins[at : at + LAST_PAGE]):
        here = here & other
    if pins[own + LAST_PAGE] or (any(pins[at + LAST_PAGE : at + PINS_PER_POOL]) and not other[-1]):
        here = here.copy()
        here[-1] = False
    return here


def tell_parents(core: Core, node: Node, change: int) -> None:
    """A subtree got its first device page of full coverage, or lost its last one."""
    parent = node.parent
    lead = core.main
    while parent is not None and parent.parent is not None:
        was = parent.below
        if was > 1 or (was and change > 0):
            parent.below = was + change
            return
        alone = parent.host_pages > parent.double_pages
        before = host_free(core, parent) if alone else 0
        parent.below = was + change
        if alone:
            parent.account.free[2 * lead + HOST] += host_free(core, parent) - before
        if change < 0:
            _offer_lead(core, parent, lead)
        if parent.device_pages:
            return
        parent = parent.parent


def raise_here(core: Core, node: Node) -> None:
    """One more reason for the device copies of the prefix that ends in `node` to stay."""
    free, lead = node.account.free, 2 * core.main
    parent = node.parent
    while parent is not None:
        pinned = node.here
        if pinned:
            node.here = pinned + 1
            return
        alone = node.host_pages > node.double_pages
        before = host_free(core, node) if alone else 0
        node.here = 1
        free[lead] -= node.device_pages
        if alone:
            free[lead + HOST] += host_free(core, node) - before
        node, parent = parent, parent.parent


def lower_here(core: Core, node: Node) -> None:
    """Takes back one `raise_here`."""
    free, lead = node.account.free, 2 * core.main
    parent = node.parent
    while parent is not None:
        pinned = node.here - 1
        if pinned:
            node.here = pinned
            return
        alone = node.host_pages > node.double_pages
        before = host_free(core, node) if alone else 0
        node.here = 0
        free[lead] += node.device_pages
        if alone:
            free[lead + HOST] += host_free(core, node) - before
        if not node.below:
            _offer_lead(core, node, core.main)
        node, parent = parent, parent.parent


def raise_some(core: Core, node: Node) -> None:
    """One more reason for the last copies of the prefix that ends in `node` to stay."""
    parent = node.parent
    while parent is not None:
        if node.some:
            node.some += 1
            return
        _change_some(core, node, 1)
        node, parent = parent, parent.parent


def lower_some(core: Core, node: Node) -> None:
    """Takes back one `raise_some`."""
    parent = node.parent
    while parent is not None:
        if node.some > 1:
            node.some -= 1
            return
        _change_some(core, node, -1)
        _offer_lead(core, node, core.main)
        node, parent = parent, parent.parent


def _change_some(core: Core, node: Node, change: int) -> None:
    alone = node.host_pages > node.double_pages
    before = host_free(core, node) if alone else 0
    node.some += change
    if alone:
        node.account.free[2 * core.main + HOST] += host_free(core, node) - before
    renew_hold(core, node)


def renew_hold(core: Core, node: Node) -> None:
    """Holds a node on the device while a last copy that must stay lies there."""
    hold = node.some > 0 and node.double_pages < node.device_pages
    if hold and not node.flags & HELD:
        node.flags |= HELD
        raise_here(core, node)
    elif not hold and node.flags & HELD:
        node.flags &= ~HELD
        lower_here(core, node)


def renew_use(core: Core, node: Node) -> None:
    """Finds out whether a leaf's last pages are of no use to anyone."""
    useless = False
    if not node.children and (core.loose or core.holey):
        stop = core.stop(node)
        useless = last_boundary(core, node, stop) < stop
    if useless != bool(node.flags & USELESS):
        node.flags ^= USELESS


def offer(core: Core, node: Node) -> None:
    """Queues a node wherever something of it may be evicted now; it may be queued where nothing is, not the reverse."""
    lead = core.lead
    if lead is not None:
        _offer_lead(core, node, lead)
    for pool, _ in core.loose:
        device, host = node.device[pool], node.host[pool]
        if device is not None or host is not None:
            _offer_loose(core, node, pool)


def _offer_lead(core: Core, node: Node, lead: int) -> None:
    push = node.account.queues.push
    at = QUEUES_PER_POOL * lead
    if node.device_pages and not node.here and not node.below:
        if node.double_pages and device_tail_is_clean(node, lead):
            push(at + CLEAN, node)
        if node.double_pages < node.device_pages:
            push(at + DIRTY, node)
        if node.flags & USELESS:
            push(at + USELESS_DEVICE, node)
    if node.host_pages and not host_pinned(node, lead):
        if node.double_pages:
            push(at + DUPLICATE, node)
        if not (node.here or node.some or node.below or has_lead_below(node)):
            if node.double_pages < node.host_pages:
                push(at + ONLY, node)
            if node.flags & USELESS:
                push(at + USELESS_HOST, node)


def _offer_loose(core: Core, node: Node, pool: int) -> None:
    at = QUEUES_PER_POOL * pool
    if node.host[pool] is None:
        wanted = ON_DEVICE
    elif node.device[pool] is None:
        wanted = ON_HOST
    else:
        wanted = IN_BOTH
    missing = (wanted << at) & ~node.flags
    if missing:
        for kind in (CLEAN, DIRTY, DUPLICATE, ONLY):
            if missing & (QUEUED << (at + kind)):
                node.account.queues.push(at + kind, node)
    if pool == core.main and node.flags & USELESS:
        node.account.queues.push(at + USELESS_DEVICE, node)
        node.account.queues.push(at + USELESS_HOST, node)


def offer_loose(core: Core, node: Node, pool: int) -> None:
    """Queues a node for one loose pool, if it has something of it."""
    if node.device[pool] is not None or node.host[pool] is not None:
        _offer_loose(core, node, pool)


def device_tail_is_clean(node: Node, lead: int) -> bool:
    """Whether the last device page of full coverage has a host copy."""
    if node.double_pages == node.device_pages:
        return True
    host = node.host[lead]
    tail = runs.end(node.device[lead]) - 1
    return host is not None and host[4 * tail + 3] != 0xFF


def has_lead_below(node: Node) -> bool:
    """Whether anything of full coverage is resident below a node."""
    return any(child.device_pages or child.host_pages or has_lead_below(child) for child in node.children.values())
