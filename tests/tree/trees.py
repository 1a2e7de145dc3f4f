"""Short ways to fill a tree in tests: a prompt is a string, one letter per page."""

from collections.abc import Mapping

import numpy as np

from hicache.coverage import Coverage, Full
from hicache.tree import EvictionPolicy, RadixTree, TreeMatch, TreePool
from hicache.units import HOLE, Tier

PAGE = 4
NAMESPACE = bytes([7]) * 32


def tree_of(
    *coverages: Coverage,
    lookahead_tokens: int = 0,
    host_duplicates_first: bool = False,
    policy: EvictionPolicy | None = None,
    device_slots: int | None = None,
) -> RadixTree:
    """A tree with pools `kv`, `a`, `b`, ... of the coverages given; one full pool by default."""
    names = ("kv", "a", "b", "c")
    pools = [
        TreePool(name, coverage, device_slots=device_slots)
        for name, coverage in zip(names, coverages or (Full(),), strict=False)
    ]
    return RadixTree(
        PAGE,
        pools,
        policy=policy,
        lookahead_tokens=lookahead_tokens,
        host_duplicates_first=host_duplicates_first,
    )


def tokens(prompt: str) -> bytes:
    """PAGE tokens per letter."""
    return np.repeat(np.frombuffer(prompt.encode(), np.uint8), PAGE).astype(np.uint32).tobytes()


def slots(*values: int | None) -> np.ndarray:
    return np.array([HOLE if value is None else value for value in values], np.int32)


def put(
    tree: RadixTree,
    prompt: str,
    first_slot: int,
    tier: Tier = Tier.DEVICE,
    only: Mapping[str, np.ndarray] | None = None,
    first_page: int = 0,
) -> TreeMatch:
    """Inserts a prompt with slots from `first_slot` on in every pool, or those given in `only` in place of them."""
    pages = len(prompt) - first_page
    runs = {pool.name: np.arange(first_slot, first_slot + pages, dtype=np.int32) for pool in tree.pools}
    runs.update(only or {})
    return tree.insert(NAMESPACE, tokens(prompt), first_page, runs, tier).match


def look(tree: RadixTree, prompt: str, limit_pages: int | None = None) -> TreeMatch:
    return tree.match(NAMESPACE, tokens(prompt), limit_pages)


def lengths(match: TreeMatch) -> tuple[int, int, int]:
    return match.pages, match.device_pages, match.usable_pages
