"""The tree decides and touches nothing: what is where, what is pinned, and what goes next."""

from hicache.tree.node import Node
from hicache.tree.policies import POLICIES
from hicache.tree.policy import NO_WISH, EvictionPolicy, Lru, NodeUse, SortKey, StatefulPolicy, TreeView, Wish
from hicache.tree.tree import RadixTree
from hicache.tree.values import Eviction, InsertResult, Pin, Receipt, Span, TreeMatch, TreePool

__all__ = [
    "NO_WISH",
    "POLICIES",
    "Eviction",
    "EvictionPolicy",
    "InsertResult",
    "Lru",
    "Node",
    "NodeUse",
    "Pin",
    "RadixTree",
    "Receipt",
    "SortKey",
    "Span",
    "StatefulPolicy",
    "TreeMatch",
    "TreePool",
    "TreeView",
    "Wish",
]
