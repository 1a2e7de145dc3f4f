"""Greedy answers of the engine are those of the model without a cache, whatever came from which tier."""

from collections.abc import Sequence
from pathlib import Path

from hicache.bench.exact.results import Check
from hicache.bench.exact.rig import Answer, full_pages, rigged
from hicache.bench.exact.subject import Plain, Subject, random_tokens
from hicache.units import Tier

_SEED, _TALK_SEED, _SHARED_SEED = 4, 5, 6
_FIRST_TURN, _LATER_TURN, _TURN_ANSWER = 21, 9, 7
_SHARED_TOKENS = (18, 27, 30, 30)
"""Tokens that each of the requests at one time has in common with the others."""
_OWN_TOKENS = 11


def check_tokens(subject: Subject, store: Path) -> Check:
    """One prompt asked cold, and again with its pages on the device, on the host and, in a new cache, in the store."""
    plan = subject.plan
    prompt = random_tokens(plan.prompt, _SEED)
    expected = subject.plain.generate(prompt, plan.answer)
    with rigged(subject, store) as rig:
        answers = {"cold": rig.ask(prompt, answer=plan.answer)[0]}
        answers["device"] = rig.ask(prompt, answer=plan.answer)[0]
        rig.settle()
        rig.empty(Tier.DEVICE)
        answers["host"] = rig.ask(prompt, answer=plan.answer)[0]
        rig.settle()
    with rigged(subject, store) as rig:
        answers["storage"] = rig.ask(prompt, answer=plan.answer)[0]
    failures = []
    same = 0
    for tier, answer in answers.items():
        agreed = _common(answer.tokens, expected)
        same += agreed
        if agreed < plan.answer:
            failures.append(f"{tier}: token {agreed} of {plan.answer} is another one than without a cache")
        if tier in answer.cached and answer.cached[tier] != full_pages(plan.prompt):
            failures.append(f"{tier}: only {dict(answer.cached)} of {plan.prompt} tokens were cached")
    asked = plan.answer * len(answers)
    return Check.judged("tokens", f"{same} of {asked}", failures, equal=same, tried=asked)


def check_talk(subject: Subject) -> Check:
    """A conversation that grows, and requests at one time that share prefixes; then nothing is held any more."""
    failures: list[str] = []
    same = asked = cached = 0
    with rigged(subject) as rig:
        history = random_tokens(_FIRST_TURN, _TALK_SEED)
        for turn in range(subject.plan.turns):
            (answer,) = rig.ask(history, answer=_TURN_ANSWER)
            same += _agreed(subject.plain, history, answer, f"turn {turn}", failures)
            asked += _TURN_ANSWER
            cached += sum(answer.cached.values())
            if turn and not any(answer.cached.values()):
                failures.append(f"turn {turn}: nothing was cached of {len(history)} tokens")
            history = [*history, *answer.tokens, *random_tokens(_LATER_TURN, _TALK_SEED + turn + 1)]
        document = random_tokens(max(_SHARED_TOKENS), _SHARED_SEED)
        prompts = [
            document[:shared] + random_tokens(_OWN_TOKENS + index, _SHARED_SEED + index + 1)
            for index, shared in enumerate(_SHARED_TOKENS)
        ]
        answers = rig.ask(*prompts, answer=_TURN_ANSWER)
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            same += _agreed(subject.plain, prompt, answer, f"request {index} of those at one time", failures)
            asked += _TURN_ANSWER
        together = sum(sum(answer.cached.values()) for answer in answers)
        if not together:
            failures.append("requests at one time had nothing of each other")
        rig.settle()
        rig.cache.audit()
        stats = rig.cache.stats()
        held = stats.pins + stats.open_matches + stats.in_flight + sum(pool.other for pool in stats.pools)
        if held:
            failures.append(f"{held} pins, matches, transfers and slots are held at the end")
    return Check.judged(
        "talk", f"{same} of {asked}", failures, equal=same, tried=asked, cached_tokens=cached + together, held=held
    )


def _agreed(plain: Plain, prompt: Sequence[int], answer: Answer, what: str, failures: list[str]) -> int:
    agreed = plain.agreed(prompt, answer.tokens)
    if agreed < _TURN_ANSWER:
        failures.append(f"{what}: token {agreed} of {_TURN_ANSWER} is another one than without a cache")
    return agreed


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((place for place, token in enumerate(one) if token != other[place]), len(one))
