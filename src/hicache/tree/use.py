"""Every node of a used prefix counts one hit; the new recency is for what resuming at its end needs."""

from collections.abc import Sequence

from hicache.tree.core import Core
from hicache.tree.node import Node
from hicache.tree.policy import Nodes, StatefulPolicy, Wish
from hicache.tree.view import own


def touch(core: Core, node: Node, pages: int, wish: Wish) -> None:
    """Counts one use of the first `pages` pages of the prefix that ends in `node`."""
    above = node.parent
    while node.start >= pages and above is not None:
        node, above = above, above.parent
    path = []
    while above is not None:
        node.hits += 1
        path.append(node)
        node, above = above, above.parent
    if not path:
        return
    path.reverse()
    low = pages - max((reach for _, reach in core.loose), default=0)
    for place, node in enumerate(path, 1):
        if place == len(path) or core.stop(node) > low:
            core.clock += 1
            node.tick = core.clock
    if core.policy.keys_fall:
        for node in path:
            node.account.queues.lowered(node)
    if core.stateful is not None:
        for node in path:
            _lower(core, core.stateful.used(node, wish))


def fill(core: Core, policy: StatefulPolicy, path: Sequence[Node], first_page: int, wish: Wish) -> None:
    """Pages from `first_page` on to the end of a path were put in."""
    for node in path:
        if core.stop(node) > first_page:
            _lower(core, policy.filled(node, wish))


def advance(core: Core, now_s: float) -> None:
    """It is `now_s`. The tree counts from the first time that it is told: what was asked before has not aged."""
    if core.started_s is None:
        core.started_s = now_s
    if now_s - core.started_s <= core.now_s:
        return
    core.now_s = now_s - core.started_s
    if core.stateful is not None:
        _lower(core, core.stateful.expired())


def often_used(core: Core, node: Node, pages: int, hits: int) -> int:
    """How many of the first `pages` pages of the prefix that ends in `node` have so many hits: those before do too."""
    parent = node.parent
    while parent is not None and (node.hits < hits or node.start >= pages):
        node, parent = parent, parent.parent
    return 0 if parent is None else min(pages, core.stop(node))


def _lower(core: Core, fell: Nodes) -> None:
    for one in fell:
        node = own(one)
        node.account.queues.lowered(node)
