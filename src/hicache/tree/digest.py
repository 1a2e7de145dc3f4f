"""Trees that came about by the same decisions have the same digest, whatever their namespaces and clocks."""

import hashlib

from hicache.tree.core import Core
from hicache.tree.node import Node


def digest(core: Core) -> bytes:
    """SHA-256 (32 bytes) of every node, parents first: its place, tokens, slots per tier and pool, and pins."""
    hasher = hashlib.sha256(b"hicache tree 1\0")
    for node in core.walk():
        hasher.update(b"%d %d %d %d;" % (node.start, len(node.key), node.here, node.some))
        hasher.update(node.key)
        for run in _runs(node):
            hasher.update(b"%d:" % len(run))
            hasher.update(run)
    return hasher.digest()


def _runs(node: Node) -> list[bytes]:
    return [run if run is not None else b"" for run in (*node.device, *node.host)]
