"""Prefixes leave for a file, and come from one, by way of host pages: a page is taken whole, in every pool."""

from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from hicache.controller.state import State, spread
from hicache.coverage import longest_usable
from hicache.keys import TOKEN_BYTES, Namespace
from hicache.storage.prefix_file import Layouts, PoolPages, PrefixContent
from hicache.tree import Pin, Span, TreeMatch
from hicache.units import HOLE, BoolArray, Int32Array, PoolName, Tier


def layouts(state: State) -> Layouts:
    """What the pages of each pool are, derived pools included."""
    found = {}
    for entry in state.group.entries:
        layout = entry.host_pool.layout
        found[entry.name] = (layout.fingerprint, layout.page_bytes)
    return found


def copy_out(state: State, namespace: Namespace, tokens: bytes, limit_pages: int) -> PrefixContent | None:
    """Copies what the host has of a prefix, up to the last boundary that can be resumed. None if it has nothing."""
    match = state.tree.match(namespace.fingerprint, tokens, limit_pages)
    runs = {pool: state.tree.slots(match, pool, Tier.HOST, 0, match.pages) for pool in state.pools}
    pages = longest_usable([(state.coverages[pool], run != HOLE) for pool, run in runs.items()], namespace.page_size)
    if pages == 0:
        return None
    content = []
    for pool, run in runs.items():
        places = np.flatnonzero(run[:pages] != HOLE)
        for member in state.members(pool):
            if len(places):
                layout = state.group.get_pool(member).layout
                data = state.group.get_pool(member).pages[run[places]]
                content.append(PoolPages(member, layout.fingerprint, tuple(places.tolist()), data))
    ends = (pages * namespace.page_size + namespace.draft_lookahead) * TOKEN_BYTES
    return PrefixContent(namespace, tokens[:ends], pages, tuple(content))


def copy_in(state: State, content: PrefixContent) -> tuple[Span | None, int]:
    """Puts a checked prefix into host memory, as far as there is room; returns what is there, and how much is new.

    What memory has already stays as it is. The span (from page 0) is None if nothing could be taken.
    """
    name, tree = content.namespace.fingerprint, state.tree
    match = tree.match(name, content.tokens, content.pages)
    offered = _offered(state, content)
    resident = {pool: _resident(state, match, pool, content.pages) for pool in state.pools}
    with ExitStack() as undo:
        receipt = tree.pin_span(tree.span(match, 0, match.pages), Pin.SOMEWHERE)
        undo.callback(tree.unpin, receipt)
        pages = _fitting(state, content, offered, resident)
        wanted = {pool: offered[pool][:pages] & ~resident[pool][:pages] for pool in state.pools}
        demand = {pool: int(places.sum()) for pool, places in wanted.items() if places.any()}
        reservation = state.group.reserve(demand, Tier.HOST) if demand else None
        if reservation is None:
            usable = min(pages, match.usable_pages)
            return (tree.span(match, 0, usable) if usable else None), 0
        undo.enter_context(reservation)
        runs = {pool: spread(wanted[pool], reservation.slots[pool]) for pool in demand}
        runs |= {pool: np.full(pages, HOLE, np.int32) for pool in state.pools if pool not in runs}
        _fill(state, content, runs, pages)
        ends = (pages * content.namespace.page_size + content.namespace.draft_lookahead) * TOKEN_BYTES
        result = tree.insert(name, content.tokens[:ends], 0, runs, Tier.HOST)
        reservation.commit()
    state.free_host(result.duplicates)
    return tree.span(result.match, 0, result.match.pages), max(demand.values())


def _offered(state: State, content: PrefixContent) -> dict[PoolName, BoolArray]:
    """Which pages a file has of each pool with slots of its own: only where those derived from it have theirs."""
    places = {pool.pool: pool.places for pool in content.pools}
    offered = {}
    for pool in state.pools:
        offered[pool] = np.ones(content.pages, dtype=np.bool_)
        for member in state.members(pool):
            there = np.zeros(content.pages, dtype=np.bool_)
            there[list(places.get(member, ()))] = True
            offered[pool] &= there
    return offered


def _resident(state: State, match: TreeMatch, pool: PoolName, pages: int) -> BoolArray:
    there = np.zeros(pages, dtype=np.bool_)
    for tier in (Tier.DEVICE, Tier.HOST):
        there[: match.pages] |= state.tree.slots(match, pool, tier, 0, match.pages) != HOLE
    return there


def _fitting(
    state: State,
    content: PrefixContent,
    offered: dict[PoolName, BoolArray],
    resident: dict[PoolName, BoolArray],
) -> int:
    """The most pages that can be resumed with what fits into the host."""
    page_size = content.namespace.page_size
    pages = content.pages
    while pages:
        usable = [(state.coverages[pool], (offered[pool] | resident[pool])[:pages]) for pool in state.pools]
        pages = longest_usable(usable, page_size)
        lacking = {pool: int((offered[pool] & ~resident[pool])[:pages].sum()) for pool in state.pools}
        if all(count <= state.room(pool, Tier.HOST) for pool, count in lacking.items()):
            return pages
        pages -= 1
    return 0


def _fill(state: State, content: PrefixContent, runs: Mapping[PoolName, Int32Array], pages: int) -> None:
    for part in content.pools:
        source = state.group.get_entry(part.pool).derived_from or part.pool
        places = np.array(part.places, dtype=np.int64)
        places = places[places < pages]
        slots = runs[source][places]
        taken = slots != HOLE
        state.group.get_pool(part.pool).pages[slots[taken]] = part.data[: len(places)][taken]
