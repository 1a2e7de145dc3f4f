"""Whether this machine gives a row the same bits in any chunk and batch is found out, not assumed."""

from collections.abc import Iterator

import numpy as np
import torch

from hicache.device.torch import RESERVED_SLOTS
from hicache.engine.attention import KV_BLOCK_TOKENS, Segment, TokenArray, padded
from hicache.engine.executor import Executor
from hicache.units import DeviceSlots

PROMPT_TOKENS = 96


def is_exact(executor: Executor, vocabulary: int) -> bool:
    """Whether a random prompt's logits and KV have equal bits: computed whole, in chunks, in a batch, padded further.

    Uses the pool's first slots, which no request may have yet, and leaves them zeroed. A small pool gets a shorter
    prompt.
    """
    pool = executor.pool
    pages = min((pool.slots - RESERVED_SLOTS) // 2, -(-PROMPT_TOKENS // pool.geometry.tokens_per_slot))
    count = min(PROMPT_TOKENS, pages * pool.geometry.tokens_per_slot)
    tokens = np.random.default_rng(0).integers(0, vocabulary, count).astype(np.uint32)
    slots = np.arange(RESERVED_SLOTS, RESERVED_SLOTS + 2 * pages, dtype=np.int32)
    first, second = DeviceSlots(slots[:pages]), DeviceSlots(slots[pages:])
    whole = executor.run([Segment(tokens, 0, first)])[0]
    expected = pool.stage(first)
    try:
        return all(
            torch.equal(whole, logits) and np.array_equal(expected, pool.stage(second))
            for logits in _other_ways(executor, tokens, first, second)
        )
    finally:
        pool.zero(DeviceSlots(slots))


def _other_ways(
    executor: Executor, tokens: TokenArray, first: DeviceSlots, second: DeviceSlots
) -> Iterator[torch.Tensor]:
    """The same prompt into the slots `second`; what else is in a batch is a part of it, again into `first`."""
    count = len(tokens)
    cuts = sorted({0, count // 2, *(max(0, count - left) for left in (3, 2, 1))})
    logits = torch.empty(0)
    for start, stop in zip(cuts, [*cuts[1:], count], strict=True):
        logits = executor.run([Segment(tokens[start:stop], start, second)])[0]
    yield logits
    others = [Segment(tokens[: max(1, count // part)], 0, first) for part in (13, 3)]
    yield executor.run([others[0], Segment(tokens, 0, second), others[1]])[1]
    yield executor.run([Segment(tokens, 0, second, kv_tokens=padded(count, KV_BLOCK_TOKENS) + KV_BLOCK_TOKENS)])[0]
