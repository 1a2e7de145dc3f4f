"""Times the tree alone, in thread CPU time: chats with shared system prompts, and a tree of 200,000 leaves."""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from hicache.coverage import Checkpoint, Full, Window
from hicache.tree import Pin, RadixTree, TreePool
from hicache.units import HOLE, Int32Array, Tier

Tokens: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]

NAMESPACE = bytes(32)
VOCABULARY = 150_000
REQUESTS = 10_000
SYSTEM_PROMPTS = 40
LONGEST_TOKENS = 32_768
LONG_TOKENS = 102_400
BRANCHES = 2_100
LEAVES_PER_BRANCH = 96
LEAF_TOKENS = 64
BRANCH_TOKENS = 128
SMALL_EVICTIONS = 20
CHECKPOINT_EVERY_PAGES = 8

ONE_POOL = (TreePool("kv", Full()),)
THREE_POOLS = (TreePool("kv", Full()), TreePool("swa", Window(1024)), TreePool("state", Checkpoint()))

_now = time.thread_time


@dataclass(frozen=True, slots=True)
class Request:
    """The first `length` tokens of a conversation."""

    order: int
    conversation: Tokens
    length: int


@dataclass(slots=True)
class Times:
    """Seconds spent in each step of a request."""

    match: float = 0.0
    slots: float = 0.0
    pin: float = 0.0
    insert: float = 0.0
    unpin: float = 0.0
    hits: list[float] = field(default_factory=list)

    def total(self) -> float:
        """Seconds in all steps."""
        return self.match + self.slots + self.pin + self.insert + self.unpin


def run(page: int = 64, requests: int = REQUESTS, branches: int = BRANCHES, seed: int = 0) -> dict[str, Any]:
    """Runs the workload with one pool on one tier, and with a full, a windowed and a checkpoint pool on two tiers.

    `page`: tokens per page. The times are in microseconds (`_us`) or seconds (`_s`) of thread CPU time, per call;
    `total_us` and its parts are means per request, `bytes_per_node` what a node takes beyond 4 bytes per token.
    """
    return {
        "page": page,
        "one_pool": _run_pools(page, ONE_POOL, False, requests, branches, seed),
        "three_pools": _run_pools(page, THREE_POOLS, True, requests, branches, seed),
    }


def _run_pools(
    page: int, pools: Sequence[TreePool], two_tiers: bool, requests: int, branches: int, seed: int
) -> dict[str, Any]:
    report = _run_chats(page, pools, two_tiers, requests, np.random.default_rng(seed))
    gc.collect()
    report.update(_run_many_leaves(page, pools, two_tiers, branches, np.random.default_rng(seed + 1)))
    gc.collect()
    rng = np.random.default_rng(seed + 2)
    report["match_100k_us"] = {str(nodes): _match_long(page, pools, two_tiers, nodes, rng) for nodes in (1, 40, 1600)}
    return report


def chats(requests: int, rng: np.random.Generator) -> list[Request]:
    """Conversations of 1 to 12 turns that start with one of some system prompts and grow, their turns interleaved."""
    systems = [rng.integers(0, VOCABULARY, int(size)) for size in rng.integers(512, 4096, SYSTEM_PROMPTS)]
    found: list[Request] = []
    number = 0
    while len(found) < requests:
        turns = int(rng.integers(1, 13))
        system = systems[int(rng.zipf(1.5) - 1) % SYSTEM_PROMPTS]
        length = max(1024, len(system) + 64)
        lengths = []
        for _ in range(turns):
            length = min(LONGEST_TOKENS, length + int(rng.exponential(1800)) + 32)
            lengths.append(length)
        body = rng.integers(0, VOCABULARY, lengths[-1] - len(system))
        tokens = np.concatenate([system, body]).astype(np.uint32)
        orders = [number + SYSTEM_PROMPTS * turn + int(rng.integers(0, SYSTEM_PROMPTS)) for turn in range(turns)]
        found += [Request(order, tokens, size) for order, size in zip(orders, lengths, strict=True)]
        number += 1
    found.sort(key=lambda request: request.order)
    return found[:requests]


def runs_for(pools: Sequence[TreePool], first: int, stop: int, page: int) -> Mapping[str, Int32Array]:
    """Slots for pages `first` to `stop` of every pool, where a request that ends there would have something."""
    pages = np.arange(first, stop, dtype=np.int32)
    found = {}
    for pool in pools:
        slots = pages.copy()
        if isinstance(pool.coverage, Checkpoint):
            kept = (pages + 1) % CHECKPOINT_EVERY_PAGES == 0
            slots[~kept] = HOLE
            slots[-1:] = pages[-1:]
        elif isinstance(pool.coverage, Window):
            slots[pages < pool.coverage.required(stop, page).start] = HOLE
        found[pool.name] = slots
    return found


def _run_chats(
    page: int, pools: Sequence[TreePool], two_tiers: bool, requests: int, rng: np.random.Generator
) -> dict[str, Any]:
    tree = RadixTree(page, pools)
    times = Times()
    hit_tokens = asked_tokens = 0
    for request in chats(requests, rng):
        tokens = request.conversation[: request.length].tobytes()
        hit_tokens += _one_request(tree, tokens, request.length // page, times, two_tiers) * page
        asked_tokens += request.length
    start = _now()
    eviction = tree.evict(pools[0].name, Tier.DEVICE, 1_000_000 // page, drop_dirty=True)
    seconds = _now() - start
    micro = 1e6 / requests
    return {
        "total_us": round(times.total() * micro, 1),
        "match_us": round(times.match * micro, 1),
        "slots_us": round(times.slots * micro, 1),
        "pin_us": round(times.pin * micro, 1),
        "insert_us": round(times.insert * micro, 1),
        "unpin_us": round(times.unpin * micro, 1),
        "hit_rate": round(hit_tokens / asked_tokens, 4),
        "evict_1m_large_leaves_s": round(seconds, 5),
        "evicted_large_leaves_pages": eviction.count(pools[0].name, Tier.DEVICE),
    }


def _one_request(tree: RadixTree, tokens: bytes, pages: int, times: Times, two_tiers: bool) -> int:
    """What the owner of a tree does for one request. Returns the pages that were there."""
    page = tree.page_size
    a = _now()
    match = tree.match(NAMESPACE, tokens)
    b = _now()
    cached = match.device_pages
    for pool in tree.pools:
        tree.slots(match, pool.name, Tier.DEVICE, pool.coverage.required(cached, page).start, cached)
    c = _now()
    receipt = tree.pin(match, Pin.HERE, cached)
    d = _now()
    fresh = runs_for(tree.pools, cached, pages, page)
    e = _now()
    result = tree.insert(NAMESPACE, tokens, cached, fresh, known=match)
    f = _now()
    tree.unpin(receipt)
    g = _now()
    times.match += b - a
    times.slots += c - b
    times.pin += d - c
    times.insert += f - e
    times.unpin += g - f
    if two_tiers:
        _back_up(tree, result.match.pages, cached, tokens)
    return cached


def _back_up(tree: RadixTree, pages: int, first: int, tokens: bytes) -> None:
    """Gives what was added host copies, outside the times: a tree on two tiers is timed with both filled."""
    match = tree.match(NAMESPACE, tokens)
    if first < pages:
        tree.attach(tree.span(match, first, pages), Tier.HOST, runs_for(tree.pools, first, pages, tree.page_size))


def _run_many_leaves(
    page: int, pools: Sequence[TreePool], two_tiers: bool, branches: int, rng: np.random.Generator
) -> dict[str, Any]:
    leaf_tokens = max(page, LEAF_TOKENS)
    branch_tokens = max(page, BRANCH_TOKENS)
    gc.collect()
    before = _resident_bytes()
    tree = RadixTree(page, pools)
    spent = 0.0
    for _ in range(branches):
        branch = rng.integers(0, VOCABULARY, branch_tokens)
        leaves = rng.integers(0, VOCABULARY, (LEAVES_PER_BRANCH, leaf_tokens))
        leaves[:, 0] = VOCABULARY + np.arange(LEAVES_PER_BRANCH)
        for leaf in leaves:
            tokens = np.concatenate([branch, leaf]).astype(np.uint32).tobytes()
            pages = len(tokens) // 4 // page
            known = branch_tokens // page if leaf is not leaves[0] else 0
            fresh = runs_for(pools, 0, pages, page)
            start = _now()
            tree.insert(NAMESPACE, tokens, 0, fresh)
            spent += _now() - start
            if two_tiers:
                _back_up(tree, pages, known, tokens)
    gc.collect()
    nodes = tree.nodes
    kept_tokens = branches * (branch_tokens + LEAVES_PER_BRANCH * leaf_tokens)
    grown = _resident_bytes() - before
    return {
        "nodes": nodes,
        "insert_leaf_us": round(spent / (branches * LEAVES_PER_BRANCH) * 1e6, 2),
        "bytes_per_node": round((grown - 4 * kept_tokens) / nodes, 1),
        **_evictions(tree, pools[0].name, page),
    }


def _evictions(tree: RadixTree, pool: str, page: int) -> dict[str, Any]:
    small = []
    for _ in range(SMALL_EVICTIONS):
        start = _now()
        tree.evict(pool, Tier.DEVICE, max(1, 1024 // page), drop_dirty=True)
        small.append(_now() - start)
    start = _now()
    tree.evict(pool, Tier.DEVICE, 1_000_000 // page, drop_dirty=True)
    return {"evict_1024_us": round(sum(small) / len(small) * 1e6, 1), "evict_1m_s": round(_now() - start, 4)}


def _match_long(page: int, pools: Sequence[TreePool], two_tiers: bool, nodes: int, rng: np.random.Generator) -> float:
    """Match and slots of a prompt of 102,400 tokens whose path has about `nodes` nodes; median, microseconds."""
    tree = RadixTree(page, pools)
    tokens = rng.integers(0, VOCABULARY, LONG_TOKENS).astype(np.uint32).tobytes()
    pages = LONG_TOKENS // page
    step = max(1, pages // nodes)
    for stop in range(step, pages + 1, step):
        tree.insert(NAMESPACE, tokens, stop - step, runs_for(pools, stop - step, stop, page))
        if two_tiers:
            _back_up(tree, stop, stop - step, tokens)
    spent = []
    for _ in range(15):
        start = _now()
        match = tree.match(NAMESPACE, tokens)
        cached = match.device_pages
        for pool in pools:
            tree.slots(match, pool.name, Tier.DEVICE, pool.coverage.required(cached, page).start, cached)
        spent.append(_now() - start)
        assert cached == pages // step * step
    return round(median(spent) * 1e6, 1)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as source:
        return int(source.read().split()[1]) * 4096
