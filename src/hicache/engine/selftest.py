"""Whether this machine gives a row the same bits in any chunk and batch is found out, not assumed."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from hicache.device.torch import RESERVED_SLOTS
from hicache.engine.executor import Executor
from hicache.engine.segment import Segment, TokenArray, padded
from hicache.engine.token_pools import KV_BLOCK_TOKENS
from hicache.units import ByteArray, DeviceSlots, PoolName

PROMPT_TOKENS = 96


def is_exact(executor: Executor, vocabulary: int) -> bool:
    """Whether a random prompt's logits and KV have equal bits: computed whole, in chunks, in a batch, padded further.

    Uses the pools' first slots, which no request may have yet, and leaves them zeroed. Small pools get a shorter
    prompt. Recurrent state is computed in pieces that follow the chunks: a model that has any is not tried, nor is a
    pool of a single slot.
    """
    if executor.routes.state_pools:
        return False
    pools = [executor.pools[name] for name in executor.routes.sights]
    page_tokens = pools[0].geometry.tokens_per_slot
    pages = min(*((pool.slots - RESERVED_SLOTS) // 2 for pool in pools), -(-PROMPT_TOKENS // page_tokens))
    if not pages:
        return False
    count = min(PROMPT_TOKENS, pages * page_tokens)
    tokens = np.random.default_rng(0).integers(0, vocabulary, count).astype(np.uint32)
    slots = np.arange(RESERVED_SLOTS, RESERVED_SLOTS + 2 * pages, dtype=np.int32)
    first, second = DeviceSlots(slots[:pages]), DeviceSlots(slots[pages:])
    whole = _run(executor, Segment(tokens, 0, _everywhere(executor, first)))
    expected = _staged(executor, first)
    try:
        return all(
            torch.equal(whole, logits) and _equal(expected, _staged(executor, second))
            for logits in _other_ways(executor, tokens, first, second)
        )
    finally:
        for pool in pools:
            pool.zero(DeviceSlots(slots))


def _other_ways(
    executor: Executor, tokens: TokenArray, first: DeviceSlots, second: DeviceSlots
) -> Iterator[torch.Tensor]:
    """The same prompt into the slots `second`; what else is in a batch is a part of it, again into `first`."""
    count = len(tokens)
    here, there = _everywhere(executor, first), _everywhere(executor, second)
    cuts = sorted({0, count // 2, *(max(0, count - left) for left in (3, 2, 1))})
    logits = torch.empty(0)
    for start, stop in zip(cuts, [*cuts[1:], count], strict=True):
        logits = _run(executor, Segment(tokens[start:stop], start, there))
    yield logits
    others = [Segment(tokens[: max(1, count // part)], 0, here) for part in (13, 3)]
    yield executor.run([others[0], Segment(tokens, 0, there), others[1]])[1].logits[-1]
    yield _run(executor, Segment(tokens, 0, there, kv_tokens=padded(count, KV_BLOCK_TOKENS) + KV_BLOCK_TOKENS))


def _run(executor: Executor, segment: Segment) -> torch.Tensor:
    return executor.run([segment])[0].logits[-1]


def _everywhere(executor: Executor, slots: DeviceSlots) -> Mapping[PoolName, DeviceSlots]:
    return dict.fromkeys(executor.routes.token_pools, slots)


def _staged(executor: Executor, slots: DeviceSlots) -> list[ByteArray]:
    return [executor.pools[name].stage(slots) for name in executor.routes.sights]


def _equal(one: list[ByteArray], other: list[ByteArray]) -> bool:
    return all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))
