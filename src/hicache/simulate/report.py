"""What a run was like, in numbers of the simulated machine: virtual seconds, tokens, bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hicache.cache.stats import CacheStats
from hicache.engine.types import Chunk
from hicache.engine.work import CoreStats
from hicache.simulate.links import Carried, Lane
from hicache.simulate.requests import Asked


@dataclass(frozen=True, slots=True)
class Report:
    """One run. Equal seeds have equal reports; `digest` is over every event.

    Tokens per second are those computed for prompts and chosen for answers, prompts from the cache included. `hits` are
    tokens of prompts by tier; `moved_bytes` and `busy_s` by link; `lines` the
    events, if they were kept.
    """

    seed: int
    digest: str
    events: int
    steps: int
    virtual_s: float
    requests: Mapping[str, int]
    prompt_tokens: int
    answer_tokens: int
    prefilled_tokens: int
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    hits: Mapping[str, int]
    preemptions: int
    retractions: int
    void_steps: int
    drafts_accepted: int
    moved_bytes: Mapping[str, int]
    busy_s: Mapping[str, float]
    faults: int
    lost: int
    lines: tuple[str, ...] = ()


def make_report(
    seed: int,
    digest: str,
    events: int,
    virtual_s: float,
    asked: Sequence[Asked],
    core: CoreStats,
    cache: CacheStats,
    carried: Mapping[Lane, Carried],
    lost: int,
    lines: tuple[str, ...],
) -> Report:
    """The report of a run that has ended."""
    firsts = sorted(_firsts(asked))
    prompts = sum(one.known.prompt_tokens for one in asked if one.chunks and one.chunks[-1].finish_reason == "length")
    answers = sum(len(one.tokens) for one in asked)
    reasons = [one.chunks[-1].finish_reason or "none" for one in asked if one.chunks]
    return Report(
        seed=seed,
        digest=digest,
        events=events,
        steps=core.steps,
        virtual_s=virtual_s,
        requests={reason: reasons.count(reason) for reason in sorted(set(reasons))},
        prompt_tokens=prompts,
        answer_tokens=answers,
        prefilled_tokens=core.prefill_tokens,
        tokens_per_s=(prompts + answers) / virtual_s if virtual_s else 0.0,
        ttft_p50_s=_quantile(firsts, 0.5),
        ttft_p95_s=_quantile(firsts, 0.95),
        hits={tier.value: tokens for tier, tokens in cache.hit_tokens.items()},
        preemptions=core.preemptions,
        retractions=core.retractions,
        void_steps=core.void_steps,
        drafts_accepted=core.accepted_tokens,
        moved_bytes={lane.value: round(one.nbytes) for lane, one in carried.items()},
        busy_s={lane.value: one.busy_s for lane, one in carried.items()},
        faults=sum(one.bad for one in carried.values()),
        lost=lost,
        lines=lines,
    )


def _firsts(asked: Iterable[Asked]) -> Iterable[float]:
    for one in asked:
        first: Chunk | None = next((chunk for chunk in one.chunks if chunk.ttft_s is not None), None)
        if first is not None and first.ttft_s is not None:
            yield first.ttft_s


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
