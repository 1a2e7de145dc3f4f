"""Eviction checks whatever a queue hands out: no pinned copy goes, and none that something kept depends on."""

import heapq
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hicache.tree import runs
from hicache.tree.accounts import Account
from hicache.tree.core import (
    CLEAN,
    DIRTY,
    DUPLICATE,
    ONLY,
    QUEUES_PER_POOL,
    USELESS_DEVICE,
    USELESS_HOST,
    Core,
)
from hicache.tree.freed import Freed
from hicache.tree.ledger import book_device_loss, has_lead_below, host_pinned, loose_mask, offer, renew_use
from hicache.tree.node import DEVICE, HOST, USELESS, Node
from hicache.tree.queues import Entry
from hicache.tree.reach import last_boundary
from hicache.tree.shape import drop, remove, truncate
from hicache.units import BoolArray

Places: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]


def evict(
    core: Core, pool: int, tier: int, count: int, drop_dirty: bool, freed: Freed, keep_duplicates: bool = False
) -> None:
    """Frees `count` slots of a pool in a tier, or what there is.

    More go where a prefix has to be cut down to where it can be resumed.
    """
    stop = count
    useless = USELESS_DEVICE if tier == DEVICE else USELESS_HOST
    for accounts, beyond in core.accounts.stages():
        source = _Source(accounts, beyond, 2 * core.classes[pool] + tier)
        if pool in (core.main, *core.full):
            _drain(core, source, pool, tier, [useless], stop, True, freed)
        for numbers in _order(core, tier, drop_dirty, keep_duplicates):
            if freed.counts[tier][pool] >= stop:
                return
            _drain(core, source, pool, tier, numbers, stop, drop_dirty, freed)


def _order(core: Core, tier: int, drop_dirty: bool, keep_duplicates: bool) -> list[list[int]]:
    if tier == DEVICE:
        return [[CLEAN, DIRTY] if drop_dirty else [CLEAN]]
    if keep_duplicates:
        return [[ONLY]]
    return [[DUPLICATE], [ONLY]] if core.host_duplicates_first else [[ONLY], [DUPLICATE]]


class _Source(NamedTuple):
    """Whose pages may go; with `beyond`, only those beyond what is promised at `place`."""

    accounts: tuple[Account, ...]
    beyond: bool
    place: int

    def limit(self, account: Account, need: int) -> int:
        """How many slots may be taken of an account now, at most `need`."""
        over = account.over(self.place) if self.beyond else None
        return need if over is None else min(need, over)


def _drain(
    core: Core, source: _Source, pool: int, tier: int, kinds: list[int], stop: int, drop_dirty: bool, freed: Freed
) -> None:
    """Evicts from the first of some queues' heads until `stop` slots are free or nothing more may go."""
    numbers = [QUEUES_PER_POOL * core.classes[pool] + kind for kind in kinds]
    while freed.counts[tier][pool] < stop:
        found = _first(source, numbers)
        if found is None:
            return
        number, node = found
        node.account.queues.pop(number)
        if core.stateful is not None:
            core.stateful.taken(node)
        kind = number % QUEUES_PER_POOL
        before = freed.counts[tier][pool]
        need = source.limit(node.account, stop - before)
        _take(core, node, core.classes[pool], tier, kind, need, drop_dirty, freed)
        if freed.counts[tier][pool] > before and node.parent is not None:
            offer(core, node)


def _first(source: _Source, numbers: list[int]) -> tuple[int, Node] | None:
    best: Entry | None = None
    found = None
    for account in source.accounts:
        if source.limit(account, 1) < 1:
            continue
        for number in numbers:
            entry = account.queues.peek(number)
            if entry is not None and (best is None or entry[:2] < best[:2]):
                best, found = entry, (number, entry[2])
    return found


def _take(core: Core, node: Node, pool: int, tier: int, kind: int, need: int, drop_dirty: bool, freed: Freed) -> None:
    if kind in (USELESS_DEVICE, USELESS_HOST):
        _take_useless(core, node, pool, tier, need, freed)
    elif pool != core.lead:
        _take_loose(core, node, pool, tier, kind, need, drop_dirty, freed)
    elif kind == DUPLICATE:
        _take_duplicates(core, node, pool, need, 0, freed)
    elif kind == ONLY:
        _take_last_copies(core, node, pool, need, freed)
    else:
        _take_device(core, node, pool, need, drop_dirty, freed)


def _take_device(core: Core, node: Node, lead: int, need: int, drop_dirty: bool, freed: Freed) -> None:
    """From the tail on; what then has no copy left takes the pages after it along, down to where one can resume."""
    if node.here or node.below or not node.device_pages:
        return
    size = node.device_pages
    if size <= need and not node.host_pages and drop_dirty and not node.children and size == core.size(node):
        remove(core, node, freed)
        return
    if size <= need and node.double_pages == size:
        _take_clean(core, node, freed)
        return
    device = runs.mask(node.device[lead], core.size(node))
    dirty = device & ~runs.mask(node.host[lead], core.size(node))
    places = np.flatnonzero(device)
    cut = int(places[-min(need, len(places))])
    dirty_places = np.flatnonzero(dirty)
    if not drop_dirty and len(dirty_places):
        cut = max(cut, int(dirty_places[-1]) + 1)
    vanishing = dirty_places[dirty_places >= cut]
    if len(vanishing):
        at = last_boundary(core, node, node.start + int(vanishing[0]))
        truncate(core, node, at, freed)
        if node.parent is None:
            return
    gone = np.arange(core.size(node)) >= cut
    if (gone & runs.mask(node.device[lead], core.size(node))).any():
        drop(core, node, lead, DEVICE, gone, freed)


def _take_clean(core: Core, node: Node, freed: Freed) -> None:
    """All device pages of full coverage, each of which has a host copy: nothing depends on these."""
    held = list(node.device)
    for pool in core.full:
        freed.add(node, DEVICE, pool, held[pool])
        held[pool] = None
    book_device_loss(core, node, tuple(held))


def _take_duplicates(core: Core, node: Node, lead: int, need: int, low: int, freed: Freed) -> None:
    if host_pinned(node, lead) or not node.host_pages:
        return
    size = core.size(node)
    double = runs.mask(node.device[lead], size) & runs.mask(node.host[lead], size)
    double &= np.arange(size) >= low
    places = np.flatnonzero(double)[-need:]
    if len(places):
        drop(core, node, lead, HOST, _at(size, places), freed)


def _take_last_copies(core: Core, node: Node, lead: int, need: int, freed: Freed) -> None:
    if node.here or node.some or node.below or host_pinned(node, lead) or has_lead_below(node):
        return
    after = runs.end(node.device[lead])
    places = np.flatnonzero(runs.mask(node.host[lead], core.size(node)))
    places = places[places >= after][-need:]
    if len(places):
        at = last_boundary(core, node, node.start + int(places[0]))
        truncate(core, node, max(at, node.start + after), freed)


def _take_useless(core: Core, node: Node, pool: int, tier: int, need: int, freed: Freed) -> None:
    """The pages after the last one that anyone could resume at."""
    renew_use(core, node)
    if not node.flags & USELESS:
        return
    low = max(0, last_boundary(core, node, core.stop(node)) - node.start)
    size = core.size(node)
    after = np.arange(size) >= low
    if pool != core.lead:
        places = np.flatnonzero(loose_mask(core, node, pool, tier) & after)[:need]
        if len(places):
            drop(core, node, pool, tier, _at(size, places), freed)
        return
    if node.here or node.some:
        return
    there = int((runs.mask((node.device, node.host)[tier][pool], size) & after).sum())
    if not there:
        return
    if tier == DEVICE:
        _take_device(core, node, pool, min(need, there), True, freed)
        return
    before = freed.counts[HOST][pool]
    _take_last_copies(core, node, pool, min(need, there), freed)
    rest = min(need, there) - (freed.counts[HOST][pool] - before)
    if rest > 0 and node.parent is not None:
        _take_duplicates(core, node, pool, rest, low, freed)


def _take_loose(
    core: Core, node: Node, pool: int, tier: int, kind: int, need: int, drop_dirty: bool, freed: Freed
) -> None:
    """From the head on."""
    size = core.size(node)
    free = loose_mask(core, node, pool, tier)
    other = runs.mask((node.host, node.device)[tier][pool], size)
    if kind == DUPLICATE or (tier == DEVICE and not drop_dirty):
        free = free & other
    elif kind == ONLY:
        free = free & ~other
    places = np.flatnonzero(free)[:need]
    if len(places):
        drop(core, node, pool, tier, _at(size, places), freed)


def _at(size: int, places: Places) -> BoolArray:
    gone = np.zeros(size, np.bool_)
    gone[places] = True
    return gone


def dirty_pages(core: Core, pool: int, count: int) -> list[tuple[Node, int, int]]:
    """The next device pages of a pool to be evicted that have no host copy: nodes and absolute pages, in order."""
    pool = core.classes[pool]
    found: list[tuple[Node, int, int]] = []
    for accounts, beyond in core.accounts.stages():
        missing = count - sum(stop - start for _, start, stop in found)
        listed = frozenset(node for node, _, _ in found)
        found += _dirty_from(core, _Source(accounts, beyond, 2 * pool + DEVICE), pool, missing, listed)
    return found


def _dirty_from(
    core: Core, source: _Source, pool: int, count: int, listed: frozenset[Node]
) -> list[tuple[Node, int, int]]:
    number = QUEUES_PER_POOL * pool + DIRTY
    found: list[tuple[Node, int, int]] = []
    seen: list[Node] = []
    waiting: dict[Node, int] = {}
    parents: list[Entry] = []
    need = count
    while need > 0:
        head = _first(source, [number])
        entry = None if head is None else head[1].account.queues.peek(number)
        if parents and (entry is None or parents[0][:2] < entry[:2]):
            node = heapq.heappop(parents)[2]
        elif entry is None:
            break
        else:
            node = entry[2].account.queues.pop(number)
            seen.append(node)
            if node in listed or (pool == core.lead and node.below):
                continue
        pieces = _dirty_of(core, node, pool, need)
        found += pieces
        need -= sum(stop - start for _, start, stop in pieces)
        if pieces and pool == core.lead:
            _next_parent(core, node, waiting, parents)
    for node in seen:
        offer(core, node)
    return found


def _dirty_of(core: Core, node: Node, pool: int, need: int) -> list[tuple[Node, int, int]]:
    size = core.size(node)
    if pool != core.lead:
        free = loose_mask(core, node, pool, DEVICE) & ~runs.mask(node.host[pool], size)
        return [(node, node.start + low, node.start + high) for low, high in _stretches(np.flatnonzero(free)[:need])]
    if node.here or node.flags & USELESS:
        return []
    places = np.flatnonzero(runs.mask(node.device[pool], size) & ~runs.mask(node.host[pool], size))
    if not len(places):
        return []
    at = last_boundary(core, node, node.start + int(places[-min(need, len(places))])) - node.start
    stretches = _stretches(places[places >= at])
    return [(node, node.start + low, node.start + high) for low, high in reversed(stretches)]


def _stretches(places: Places) -> list[tuple[int, int]]:
    """Ascending page numbers as ranges without gaps."""
    if not len(places):
        return []
    breaks = np.flatnonzero(np.diff(places) > 1)
    lows = [int(places[0]), *(int(places[place + 1]) for place in breaks)]
    highs = [*(int(places[place]) + 1 for place in breaks), int(places[-1]) + 1]
    return list(zip(lows, highs, strict=True))


def _next_parent(core: Core, node: Node, waiting: dict[Node, int], parents: list[Entry]) -> None:
    """Adds the parent to the queue once all that is below it on the device was listed."""
    parent = node.parent
    while parent is not None and parent.parent is not None:
        waiting[parent] = waiting.get(parent, 0) + 1
        if waiting[parent] < parent.below or parent.here:
            return
        if parent.device_pages:
            heapq.heappush(parents, (core.policy.key(parent), parent.start, parent))
            return
        parent = parent.parent
