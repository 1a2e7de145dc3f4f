"""What is flushed can't be found any more: it leaves the tree, or goes by another name until its last pin is gone."""

from collections.abc import Iterator, Sequence

from hicache.tree import runs
from hicache.tree.core import Core
from hicache.tree.freed import Freed
from hicache.tree.node import Node
from hicache.tree.shape import pinned, remove
from hicache.units import PoolName, Tier


def flush(core: Core, names: Sequence[bytes], freed: Freed) -> None:
    """Takes everything out of some namespaces but what is pinned and what leads to it."""
    for name in names:
        for node in reversed(list(_below(core, name))):
            if node.parent is not None and not node.children and not pinned(node):
                remove(core, node, freed)


def rename(core: Core, name: bytes, other: bytes) -> None:
    """What is there of the namespace `name` is from now on of `other`, which has nothing."""
    root = core.roots.pop(name, None)
    if root is not None:
        root.keys = other
        core.roots[other] = root


def held(core: Core, name: bytes) -> dict[Tier, dict[PoolName, int]]:
    """How many slots a namespace has, per tier and pool."""
    device, host = [dict.fromkeys((pool.name for pool in core.pools), 0) for _ in range(2)]
    for node in _below(core, name):
        for pool, here, there in zip(core.pools, node.device, node.host, strict=True):
            device[pool.name] += runs.count(here)
            host[pool.name] += runs.count(there)
    return {Tier.DEVICE: device, Tier.HOST: host}


def _below(core: Core, name: bytes) -> Iterator[Node]:
    """The nodes of a namespace, parents first."""
    root = core.roots.get(name)
    nodes = [] if root is None else list(root.children.values())
    for node in nodes:
        yield node
        nodes.extend(node.children.values())
