"""The tree decides and touches nothing: what is where, what is pinned, and what goes next."""

from hicache.tree.node import Node
from hicache.tree.policy import EvictionPolicy, Lru, NodeUse
from hicache.tree.tree import RadixTree
from hicache.tree.values import Eviction, InsertResult, Pin, Receipt, Span, TreeMatch, TreePool

__all__ = [
    "Eviction",
    "EvictionPolicy",
    "InsertResult",
    "Lru",
    "Node",
    "NodeUse",
    "Pin",
    "RadixTree",
    "Receipt",
    "Span",
    "TreeMatch",
    "TreePool",
]
