"""What must hold of every answer and of a system at rest, whatever has failed on the way."""

from collections.abc import Iterable

from hicache.cache.stats import CacheStats
from hicache.engine.types import Chunk
from hicache.simulate.broken import RuleError
from hicache.simulate.requests import Asked
from hicache.simulate.tenants import Tenants

NO_MEMORY = "no device memory came free"
"""How the error begins of a request that waits for memory which a lost transfer holds for ever."""


def check_chunk(one: Asked, chunk: Chunk) -> None:
    """Every token is the model's own, and nothing comes after the last chunk."""
    if one.chunks and one.chunks[-1].finish_reason is not None:
        raise RuleError("answers", f"request {one.id} got a chunk after its last one: {chunk}")
    start = len(one.tokens)
    expected = one.known.answer[start : start + len(chunk.token_ids)]
    if chunk.token_ids != expected:
        raise RuleError("tokens", f"request {one.id} got {chunk.token_ids} at {start}; the model alone says {expected}")


def check_end(one: Asked, tenants: Tenants, page_size: int, *, lossy: bool) -> None:
    """An answer that has ended is whole, or its request was given up; what it had from the cache can be true."""
    last = one.chunks[-1]
    if last.finish_reason == "error":
        if not (lossy and NO_MEMORY in str(last.error)):
            raise RuleError("answers", f"request {one.id} ended with an error: {last.error}")
        return
    if last.finish_reason == "length" and len(one.tokens) != len(one.known.answer):
        raise RuleError("answers", f"request {one.id} ended after {len(one.tokens)} of {len(one.known.answer)} tokens")
    if last.finish_reason == "abort" and one.abort_s is None:
        raise RuleError("answers", f"request {one.id} was aborted, and nobody asked for that")
    if last.usage is None:
        raise RuleError("answers", f"request {one.id} ended without a usage")
    cached = sum(last.usage.cached_tokens.values())
    if not 0 <= cached < one.known.prompt_tokens or cached % page_size:
        raise RuleError("counters", f"request {one.id}: {cached} of {one.known.prompt_tokens} tokens were cached")
    if not tenants.shares(one.salt, one.known, cached):
        raise RuleError(
            "tenants", f"request {one.id}: {cached} tokens were cached that {one.salt!r} never asked before"
        )


def check_all_answered(asked: Iterable[Asked]) -> None:
    """Nobody is left without an end."""
    waiting = [one.id for one in asked if not one.chunks or one.chunks[-1].finish_reason is None]
    if waiting:
        raise RuleError("answers", f"requests {waiting[:8]} ended without an answer")


def check_idle(stats: CacheStats, lost: int) -> None:
    """Nothing is held, pinned or in flight; what lost transfers hold is all that may be missing."""
    if stats.open_matches:
        raise RuleError("idle", f"{stats.open_matches} matches are open, and no request is")
    if stats.in_flight != lost:
        raise RuleError("idle", f"{stats.in_flight} transfers are in flight, {lost} of them lost")
    if lost:
        return
    if stats.pins:
        raise RuleError("idle", f"{stats.pins} pins are held, and nobody is there")
    held = [f"{pool.other} of {pool.pool!r} ({pool.tier.value})" for pool in stats.pools if pool.other]
    if held:
        raise RuleError("idle", f"slots are neither free nor cached: {', '.join(held)}")
