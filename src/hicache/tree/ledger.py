"""A node changes between `open_books` and `close_books`; after that counters, holds and queues are right."""

from hicache.tree import runs
from hicache.tree.core import CLEAN, DIRTY, DUPLICATE, ONLY, QUEUES_PER_POOL, USELESS_DEVICE, USELESS_HOST, Core
from hicache.tree.node import DEVICE, HELD, HOLEY, HOST, USELESS, Node
from hicache.tree.reach import last_boundary
from hicache.units import BoolArray

PIN_HERE = 0
PIN_SOMEWHERE = 1
PIN_HOST = 2
LAST_PAGE = 3
"""Added to a kind: only the node's last page is pinned."""
PINS_PER_POOL = 6


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


def _recount(core: Core, node: Node, lead: int) -> None:
    device, host = node.device[lead], node.host[lead]
    size = len(node.key) // core.block_bytes
    node.device_pages = runs.count(device)
    node.host_pages = runs.count(host)
    whole = node.device_pages == size or node.host_pages == size
    holey = not whole and runs.count(runs.either(device, host)) < size
    if holey != bool(node.flags & HOLEY):
        node.flags ^= HOLEY
        core.holey += 1 if holey else -1


def _tally(core: Core, node: Node, sign: int) -> None:
    free = core.free
    lead = core.lead
    if lead is not None:
        if node.device_pages and not node.here:
            free[2 * lead] += sign * node.device_pages
        if node.host_pages:
            free[2 * lead + HOST] += sign * host_free(core, node)
    for pool, _ in core.loose:
        device, host = node.device[pool], node.host[pool]
        if node.pins is not None:
            if device is not None or host is not None:
                free[2 * pool] += sign * int(loose_mask(core, node, pool, DEVICE).sum())
                free[2 * pool + HOST] += sign * int(loose_mask(core, node, pool, HOST).sum())
            continue
        if device is not None:
            free[2 * pool] += sign * runs.count(device)
        if host is not None:
            free[2 * pool + HOST] += sign * runs.count(host)


def host_free(core: Core, node: Node) -> int:
    """How many host pages of full coverage can go from a node, once what is below it has gone."""
    lead = core.lead
    if lead is None or not node.host_pages or host_pinned(node, lead):
        return 0
    device, host = node.device[lead], node.host[lead]
    duplicates = runs.both(device, host)
    if node.here or node.some or node.below or duplicates == node.host_pages:
        return duplicates
    if device is None or host is None:
        return node.host_pages
    return duplicates + runs.count(host[4 * runs.end(device) :])


def host_pinned(node: Node, pool: int) -> bool:
    """Whether all host copies of a pool in a node are pinned."""
    return node.pins is not None and node.pins[PINS_PER_POOL * pool + PIN_HOST] > 0


def loose_mask(core: Core, node: Node, pool: int, tier: int) -> BoolArray:
    """Which pages of a loose pool may leave a tier now; bool per page."""
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
    if pins[at + PIN_SOMEWHERE]:
        here &= other
    if pins[own + LAST_PAGE] or (pins[at + PIN_SOMEWHERE + LAST_PAGE] and not other[-1]):
        here = here.copy()
        here[-1] = False
    return here


def tell_parents(core: Core, node: Node, change: int) -> None:
    """A subtree got its first device page of full coverage, or lost its last one."""
    parent = node.parent
    while parent is not None and parent.parent is not None:
        before = host_free(core, parent) if parent.host_pages else 0
        was = parent.below
        parent.below = was + change
        if core.lead is not None and parent.host_pages and not (was and parent.below):
            core.free[2 * core.lead + HOST] += host_free(core, parent) - before
        if was and parent.below:
            return
        if change < 0:
            offer(core, parent)
        if parent.device_pages:
            return
        parent = parent.parent


def raise_here(core: Core, node: Node) -> None:
    """One more reason for the device copies of the prefix that ends in `node` to stay."""
    free, lead = core.free, 2 * core.main
    parent = node.parent
    while parent is not None:
        pinned = node.here
        if pinned:
            node.here = pinned + 1
            return
        before = host_free(core, node) if node.host_pages else 0
        node.here = 1
        free[lead] -= node.device_pages
        if node.host_pages:
            free[lead + HOST] += host_free(core, node) - before
        node, parent = parent, parent.parent


def lower_here(core: Core, node: Node) -> None:
    """Takes back one `raise_here`."""
    free, lead = core.free, 2 * core.main
    parent = node.parent
    while parent is not None:
        pinned = node.here - 1
        if pinned:
            node.here = pinned
            return
        before = host_free(core, node) if node.host_pages else 0
        node.here = 0
        free[lead] += node.device_pages
        if node.host_pages:
            free[lead + HOST] += host_free(core, node) - before
        if not node.below:
            offer(core, node)
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
        offer(core, node)
        node, parent = parent, parent.parent


def _change_some(core: Core, node: Node, change: int) -> None:
    before = host_free(core, node) if node.host_pages else 0
    node.some += change
    if core.lead is not None and node.host_pages:
        core.free[2 * core.lead + HOST] += host_free(core, node) - before
    renew_hold(core, node)


def renew_hold(core: Core, node: Node) -> None:
    """Holds a node on the device while a last copy that must stay lies there."""
    lead = core.lead
    if lead is None:
        return
    hold = bool(node.some and node.device_pages) and runs.both(node.device[lead], node.host[lead]) < node.device_pages
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
    push = core.queues.push
    at = QUEUES_PER_POOL * lead
    if node.device_pages and not node.here and not node.below:
        if node.host_pages:
            if device_tail_is_clean(node, lead):
                push(at + CLEAN, node)
            if runs.both(node.device[lead], node.host[lead]) < node.device_pages:
                push(at + DIRTY, node)
        else:
            push(at + DIRTY, node)
        if node.flags & USELESS:
            push(at + USELESS_DEVICE, node)
    if node.host_pages and not host_pinned(node, lead):
        if node.device_pages:
            push(at + DUPLICATE, node)
        if not (node.here or node.some or node.below or has_lead_below(node)):
            push(at + ONLY, node)
            if node.flags & USELESS:
                push(at + USELESS_HOST, node)


def _offer_loose(core: Core, node: Node, pool: int) -> None:
    push = core.queues.push
    at = QUEUES_PER_POOL * pool
    device, host = node.device[pool], node.host[pool]
    if device is not None:
        if host is not None:
            push(at + CLEAN, node)
        push(at + DIRTY, node)
    if host is not None:
        if device is not None:
            push(at + DUPLICATE, node)
        push(at + ONLY, node)
    if pool == core.main and node.flags & USELESS:
        if device is not None:
            push(at + USELESS_DEVICE, node)
        if host is not None:
            push(at + USELESS_HOST, node)


def device_tail_is_clean(node: Node, lead: int) -> bool:
    """Whether the last device page of full coverage has a host copy."""
    host = node.host[lead]
    tail = runs.end(node.device[lead]) - 1
    return host is not None and host[4 * tail + 3] != 0xFF


def has_lead_below(node: Node) -> bool:
    """Whether anything of full coverage is resident below a node."""
    return any(child.device_pages or child.host_pages or has_lead_below(child) for child in node.children.values())
