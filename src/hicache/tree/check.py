"""Everything the tree counts and flags is recomputed here from what it holds; the first difference is an error."""

import numpy as np

from hicache.errors import InvariantError
from hicache.tree import runs
from hicache.tree.core import CLEAN, DIRTY, DUPLICATE, ONLY, QUEUES_PER_POOL, USELESS_DEVICE, USELESS_HOST, Core
from hicache.tree.ledger import (
    LAST_PAGE,
    PIN_SOMEWHERE,
    PINS_PER_POOL,
    device_tail_is_clean,
    has_lead_below,
    host_free,
    host_pinned,
    loose_mask,
)
from hicache.tree.node import DEVICE, HELD, HOLEY, HOST, QUEUED, STRAY, USELESS, Node
from hicache.tree.pins import kind_of
from hicache.tree.reach import last_boundary
from hicache.tree.values import Pin
from hicache.units import BoolArray


def check(core: Core) -> None:
    """Raises InvariantError if a node, a counter, a pin or a queue is not what the rest of the tree says."""
    nodes = list(core.walk())
    _expect(core.nodes == len(nodes), f"{core.nodes} nodes counted, {len(nodes)} there")
    for name, root in core.roots.items():
        _expect(bool(root.children) and root.keys == name, "a root without children or with another name")
        _expect(root.device is core.nothing and root.host is core.nothing, "a root that holds slots")
    for node in nodes:
        _check_shape(core, node)
        _check_residency(core, node)
    _check_slots(core, nodes)
    _check_pins(core, nodes)
    _check_counters(core, nodes)
    for node in nodes:
        _check_queues(core, node)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvariantError(otherwise)


def _check_shape(core: Core, node: Node) -> None:
    parent = node.parent
    _expect(parent is not None, "a node without a parent is in the tree")
    assert parent is not None
    size = core.size(node)
    _expect(size > 0 and len(node.key) == size * core.block_bytes, "a node's key is not whole pages")
    _expect(parent.children.get(node.key[: core.block_bytes]) is node, "a node is not at its key's place")
    _expect(node.start == core.stop(parent), f"a node starts at {node.start}, its parent ends at {core.stop(parent)}")
    for run in (*node.device, *node.host):
        _expect(run is None or (len(run) == 4 * size and runs.or_none(run) is not None), "a run of another length")
    _expect(node.keys is None or len(node.keys) == 32 * size, "page keys of another length")
    for _, marked in (node.stored or {}).values():
        _expect(len(marked) == size, "stored marks of another length")


def _check_residency(core: Core, node: Node) -> None:
    size = core.size(node)
    if core.lead is not None:
        lead = core.lead
        for pool in core.full:
            for held in (node.device, node.host):
                same = runs.mask(held[pool], size) == runs.mask(held[lead], size)
                _expect(bool(same.all()), "pools of full coverage are not together")
        _expect(node.device_pages == runs.count(node.device[lead]), "device pages miscounted")
        _expect(node.host_pages == runs.count(node.host[lead]), "host pages miscounted")
        holey = runs.count(runs.either(node.device[lead], node.host[lead])) < size
        _expect(holey == bool(node.flags & HOLEY), "a node with holes is not known as such, or the reverse")
    empty = not any(run is not None for run in (*node.device, *node.host))
    kept = node.children or node.here or node.some or node.pins is not None
    _expect(not empty or bool(kept), "an empty leaf is in the tree")
    _check_carriers(core, node, size)


def _check_carriers(core: Core, node: Node, size: int) -> None:
    if node.flags & STRAY:
        return
    for pool, _ in core.loose:
        there = runs.mask(node.device[pool], size) | runs.mask(node.host[pool], size)
        for carrier in core.carriers[pool]:
            carried = runs.mask(node.device[carrier], size) | runs.mask(node.host[carrier], size)
            stray = bool((there & ~carried).any())
            _expect(not stray, f"pool {core.pools[pool].name!r} has a page where its carrier has none")


def _check_slots(core: Core, nodes: list[Node]) -> None:
    for tier in (DEVICE, HOST):
        for pool, described in enumerate(core.pools):
            held = [(node.device, node.host)[tier][pool] for node in nodes]
            slots = runs.solid([run for run in held if run is not None])
            twice = len(slots) != len(np.unique(slots))
            _expect(not twice, f"a slot of pool {described.name!r} is at two pages")


def _check_pins(core: Core, nodes: list[Node]) -> None:
    here = dict.fromkeys(nodes, 0)
    some = dict.fromkeys(nodes, 0)
    counts = {node: [0] * (PINS_PER_POOL * len(core.pools)) for node in nodes}
    for receipt in core.receipts.values():
        for end in (receipt.spine, receipt.guard):
            if end is not None:
                _expect(end in here, "a pinned node has left the tree")
                (here if receipt.pin is Pin.HERE and end is receipt.spine else some)[end] += 1
        for part in receipt.parts:
            places = [PINS_PER_POOL * part.pool + kind_of(receipt.pin)]
            places += [PINS_PER_POOL * pool + PIN_SOMEWHERE for pool in core.carriers[part.pool] if pool != core.lead]
            node: Node | None = part.node
            while node is not None and node.parent is not None and core.stop(node) > part.start:
                if node.start < part.stop:
                    for place in places:
                        counts[node][place + (LAST_PAGE if part.last_page_only else 0)] += 1
                node = None if part.last_page_only else node.parent
    for node in reversed(nodes):
        some[node] += sum(1 for child in node.children.values() if child.some)
        here[node] += sum(1 for child in node.children.values() if child.here) + bool(node.flags & HELD)
        _expect(node.here == here[node], f"{node.here} pins of device copies counted, {here[node]} there")
        _expect(node.some == some[node], f"{node.some} pins of last copies counted, {some[node]} there")
        own = node.pins or [0] * (PINS_PER_POOL * len(core.pools))
        _expect(own == counts[node], "a pool's pins are miscounted")
        _expect(node.pins is None or any(node.pins), "empty pins are kept")
        _check_hold(core, node)


def _check_hold(core: Core, node: Node) -> None:
    if core.lead is None:
        return
    lacking = node.device_pages - runs.both(node.device[core.lead], node.host[core.lead])
    _expect(bool(node.flags & HELD) == bool(node.some and lacking), "a last copy is not held, or held without need")


def _check_counters(core: Core, nodes: list[Node]) -> None:
    holey = sum(1 for node in nodes if node.flags & HOLEY)
    _expect(core.holey == holey, f"{core.holey} nodes with holes counted, {holey} there")
    free = {account: [0] * len(account.free) for account in core.accounts.all}
    held = {account: [0] * len(account.held) for account in core.accounts.all}
    dirty = [0] * len(core.dirty)
    for node in nodes:
        below = sum(1 for child in node.children.values() if child.device_pages or child.below)
        _expect(node.below == below, f"{node.below} children with device pages counted, {below} there")
        if core.lead is not None:
            free[node.account][2 * core.lead] += 0 if node.here else node.device_pages
            free[node.account][2 * core.lead + HOST] += host_free(core, node)
        for pool in sorted({*core.classes}):
            dirty[pool] += runs.count(node.device[pool]) - runs.both(node.device[pool], node.host[pool])
        for pool, _ in core.loose:
            for tier in (DEVICE, HOST):
                free[node.account][2 * pool + tier] += int(loose_mask(core, node, pool, tier).sum())
        _expect(node.parent is not None and node.parent.account is node.account, "a node belongs to another account")
        for tier, runs_held in ((DEVICE, node.device), (HOST, node.host)):
            for pool, run in enumerate(runs_held):
                held[node.account][2 * pool + tier] += runs.count(run)
    _expect(core.dirty == dirty, f"device pages without a host copy counted as {core.dirty}, there are {dirty}")
    for account in core.accounts.all:
        said, there = account.free, free[account]
        _expect(said == there, f"evictable slots of {account.name!r} counted as {said}, there are {there}")
        said, there = account.held, held[account]
        _expect(said == there, f"slots of {account.name!r} counted as {said}, there are {there}")


def _check_queues(core: Core, node: Node) -> None:
    """Whatever may go is queued; what is queued need not be there any more."""
    size = core.size(node)
    after = np.zeros(size, np.bool_)
    if not node.children and (core.loose or core.holey):
        after = np.arange(size) >= last_boundary(core, node, core.stop(node)) - node.start
    _expect(bool(node.flags & USELESS) or not after.any(), "a useless leaf is not known as such")
    if core.lead is not None:
        _check_lead_queues(core, node, core.lead)
    _check_useless_queues(core, node, after)
    for pool, _ in core.loose:
        _check_loose_queues(core, node, pool)


def _leaf_pages(core: Core, node: Node, lead: int, tier: int) -> BoolArray:
    """Pages of full coverage that may leave a tier before anything deeper in the node does."""
    size = core.size(node)
    device = runs.mask(node.device[lead], size)
    if tier == DEVICE:
        return device
    return runs.mask(node.host[lead], size) & (device | (np.arange(size) >= runs.end(node.device[lead])))


def _check_loose_queues(core: Core, node: Node, pool: int) -> None:
    size = core.size(node)
    double = runs.mask(node.device[pool], size) & runs.mask(node.host[pool], size)
    for tier, twice, once in ((DEVICE, CLEAN, DIRTY), (HOST, DUPLICATE, ONLY)):
        free = loose_mask(core, node, pool, tier)
        if (free & double).any():
            _queued(node, pool, twice)
        if (free & ~double).any():
            _queued(node, pool, once)


def _check_useless_queues(core: Core, node: Node, after: BoolArray) -> None:
    main = core.main
    for tier, kind in ((DEVICE, USELESS_DEVICE), (HOST, USELESS_HOST)):
        if main != core.lead:
            free = loose_mask(core, node, main, tier)
        elif node.here or node.some or node.below:
            continue
        else:
            free = _leaf_pages(core, node, main, tier)
        if (free & after).any():
            _queued(node, main, kind)


def _check_lead_queues(core: Core, node: Node, lead: int) -> None:
    if node.device_pages and not node.here and not node.below:
        if device_tail_is_clean(node, lead):
            _queued(node, lead, CLEAN)
        if runs.both(node.device[lead], node.host[lead]) < node.device_pages:
            _queued(node, lead, DIRTY)
    if node.host_pages and not host_pinned(node, lead):
        duplicates = runs.both(node.device[lead], node.host[lead])
        if duplicates:
            _queued(node, lead, DUPLICATE)
        if host_free(core, node) > duplicates and not has_lead_below(node):
            _queued(node, lead, ONLY)


def _queued(node: Node, pool: int, kind: int) -> None:
    queued = node.flags & (QUEUED << (QUEUES_PER_POOL * pool + kind))
    _expect(bool(queued), f"something may be evicted and is not in queue {kind} of pool {pool}")
