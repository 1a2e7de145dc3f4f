"""Pins are counted at nodes and given back by receipt; what is pinned is known from the open receipts alone."""

from collections.abc import Mapping

from hicache.errors import InvariantError
from hicache.tree import runs
from hicache.tree.core import Core
from hicache.tree.ledger import (
    LAST_PAGE,
    PIN_HERE,
    PIN_HOST,
    PIN_SOMEWHERE,
    PINS_PER_POOL,
    close_books,
    lower_here,
    lower_some,
    offer_loose,
    open_books,
    raise_here,
    raise_some,
    tally_loose,
)
from hicache.tree.node import HOST, Node
from hicache.tree.shape import split
from hicache.tree.values import Pin, PinPart, Receipt


def kind_of(pin: Pin) -> int:
    """A pin's place among the counts of a pool."""
    if pin is Pin.HERE:
        return PIN_HERE
    return PIN_SOMEWHERE if pin is Pin.SOMEWHERE else PIN_HOST


def node_ending_at(core: Core, node: Node, page: int) -> Node:
    """The node that ends at absolute `page`, at or above `node`; split off if none does yet.

    Raises InvariantError if the prefix that ends in `node` no longer reaches that far.
    """
    if node.parent is None or core.stop(node) < page:
        raise InvariantError(f"page {page} has left the tree: a match is good until the tree changes, unless pinned")
    while node.start >= page:
        parent = node.parent
        if parent is None:
            raise InvariantError(f"page {page} is above the root")
        node = parent
    return node if core.stop(node) == page else split(core, node, page)


def cut_before(core: Core, node: Node, page: int) -> None:
    """Makes a node start at absolute `page`, at or above `node`."""
    while node.start > page:
        parent = node.parent
        if parent is None:
            return
        node = parent
    if node.start < page:
        split(core, node, page)


def window_start(core: Core, node: Node, pool: int, page: int) -> int:
    """Where the pins of a window that starts at absolute `page` start: there, or before it where the pool has nothing.

    A node is split only if a page that need not be pinned would be pinned with it.
    """
    while node.start > page and node.parent is not None:
        node = node.parent
    before = page - node.start
    for run in (node.device[pool], node.host[pool]):
        if run is not None and runs.or_none(run[: 4 * before]) is not None:
            split(core, node, page)
            return page
    return node.start


def pin_resumption(core: Core, node: Node, pin: Pin, pages: int, start: int) -> Receipt:
    """Pins what every pool needs, from page `start` on, to resume after `pages` pages of `node`'s prefix."""
    if pages <= start:
        return _open(core, pin, None, None, ())
    end = node_ending_at(core, node, pages)
    parts = []
    for pool, reach in core.loose:
        first = max(start, pages - reach, 0)
        if first >= pages:
            continue
        if reach > 1:
            first = window_start(core, end, pool, first)
        parts.append(PinPart(pool, end, first, pages, reach == 1))
    return _pin(core, pin, end, start, tuple(parts), core.lead is not None)


def pin_pages(core: Core, node: Node, pin: Pin, starts: Mapping[int, int], stop: int) -> Receipt:
    """Pins pages of some pools up to `stop`, from where `starts` says for each, whatever can be resumed with them."""
    if all(start >= stop for start in starts.values()):
        return _open(core, pin, None, None, ())
    end = node_ending_at(core, node, stop)
    parts = []
    for pool, _ in core.loose:
        start = starts.get(pool, stop)
        if start < stop - 1:
            cut_before(core, end, start)
        if start < stop:
            parts.append(PinPart(pool, end, start, stop, start == stop - 1))
    start = min([starts[pool] for pool in core.full if pool in starts], default=stop)
    return _pin(core, pin, end, start, tuple(parts), start < stop)


def _pin(core: Core, pin: Pin, end: Node, start: int, parts: tuple[PinPart, ...], with_full: bool) -> Receipt:
    lead = core.lead
    spine = guard = None
    if lead is not None and with_full:
        spine = end
        if pin is Pin.HERE:
            raise_here(core, end)
        else:
            if pin is Pin.HOST:
                cut_before(core, end, start)
                parts = (*parts, PinPart(lead, end, start, core.stop(end), False))
            raise_some(core, end)
    elif lead is not None:
        guard = end
        raise_some(core, end)
    receipt = _open(core, pin, spine, guard, parts)
    for part in parts:
        _count(core, part, pin, part.start, part.stop, 1)
    return receipt


def _open(core: Core, pin: Pin, spine: Node | None, guard: Node | None, parts: tuple[PinPart, ...]) -> Receipt:
    core.receipts_made += 1
    receipt = Receipt(core.receipts_made, pin, spine, guard, parts)
    core.receipts[receipt.serial] = receipt
    return receipt


def _settle(core: Core, receipt: Receipt) -> None:
    if core.receipts.pop(receipt.serial, None) is None:
        raise InvariantError(f"pin {receipt.serial} was given back before")


def unpin(core: Core, receipt: Receipt) -> None:
    """Gives a pin back. Raises InvariantError if it was before."""
    _settle(core, receipt)
    for part in receipt.parts:
        _count(core, part, receipt.pin, part.start, part.stop, -1)
    if receipt.spine is not None:
        if receipt.pin is Pin.HERE:
            lower_here(core, receipt.spine)
        else:
            lower_some(core, receipt.spine)
    if receipt.guard is not None:
        lower_some(core, receipt.guard)


def unpin_before(core: Core, receipt: Receipt, pool: int, page: int) -> Receipt:
    """Gives back one loose pool's pins of the nodes wholly before absolute `page`. Returns the receipt for the rest."""
    if pool in core.full:
        raise InvariantError(f"pool {core.pools[pool].name!r} needs all its pages: give its pin back as a whole")
    _settle(core, receipt)
    parts = tuple(
        part if part.pool != pool or part.start >= page else _shorten(core, part, receipt.pin, page)
        for part in receipt.parts
    )
    left = tuple(part for part in parts if part.start < part.stop)
    return _open(core, receipt.pin, receipt.spine, receipt.guard, left)


def _shorten(core: Core, part: PinPart, pin: Pin, page: int) -> PinPart:
    if page >= part.stop:
        start = part.stop
    elif part.last_page_only:
        return part
    else:
        node = part.node
        while node.start > page and node.parent is not None:
            node = node.parent
        start = max(part.start, node.start)
    _count(core, part, pin, part.start, start, -1)
    return PinPart(part.pool, part.node, start, part.stop, part.last_page_only)


def _count(core: Core, part: PinPart, pin: Pin, start: int, stop: int, change: int) -> None:
    """Counts a part's pin up or down, at the nodes of its pages `start` to `stop`, and at those pages' carriers."""
    if start >= stop:
        return
    extra = LAST_PAGE if part.last_page_only else 0
    places = [PINS_PER_POOL * part.pool + kind_of(pin) + extra]
    for carrier in core.carriers[part.pool]:
        if carrier != core.lead:
            places.append(PINS_PER_POOL * carrier + PIN_SOMEWHERE + extra)
    node: Node | None = part.node
    while node is not None and node.parent is not None:
        if node.start < stop:
            _count_node(core, node, places, change)
        if part.last_page_only or node.start <= start:
            return
        node = node.parent


def _count_node(core: Core, node: Node, places: list[int], change: int) -> None:
    for place in places:
        pins = node.pins
        counted = 0 if pins is None else pins[place]
        if counted and counted + change:
            assert pins is not None
            pins[place] = counted + change
            continue
        pool = place // PINS_PER_POOL
        if pool == core.lead:
            had_device = open_books(core, node)
            _change(core, node, place, change)
            close_books(core, node, had_device)
        else:
            _switch(core, node, pool, place - pool * PINS_PER_POOL, change)


def _switch(core: Core, node: Node, pool: int, what: int, change: int) -> None:
    """Counts a loose pool's first pin of a kind, or gives back its last one."""
    place = PINS_PER_POOL * pool + what
    pins = node.pins
    alone = pins is None or not (any(pins[place - what : place]) or any(pins[place + 1 : place - what + PINS_PER_POOL]))
    if alone and what in (PIN_HERE, PIN_HERE + LAST_PAGE):
        on_device, on_host = _kept_here(node, pool, what == PIN_HERE)
        node.account.free[2 * pool] -= change * on_device
        node.account.free[2 * pool + HOST] -= change * on_host
        _change(core, node, place, change)
    else:
        tally_loose(core, node, pool, -1)
        _change(core, node, place, change)
        tally_loose(core, node, pool, 1)
    if change < 0:
        offer_loose(core, node, pool)


def _kept_here(node: Node, pool: int, whole: bool) -> tuple[int, int]:
    """How many device and host slots of a pool a pin of device copies keeps, of the whole node or of its last page."""
    device, host = node.device[pool], node.host[pool]
    if whole:
        on_device = 0 if device is None else runs.count(device)
        if host is None:
            return on_device, 0
        return on_device, runs.count(host) - runs.both(device, host)
    if device is not None and device[-1] != runs.HOLE_SIGN:
        return 1, 0
    return 0, int(host is not None and host[-1] != runs.HOLE_SIGN)


def _change(core: Core, node: Node, place: int, change: int) -> None:
    pins = node.pins
    if pins is None:
        pins = node.pins = [0] * (PINS_PER_POOL * len(core.pools))
    pins[place] += change
    if not pins[place] and not any(pins):
        node.pins = None
