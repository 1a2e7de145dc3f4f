"""Prefixes of several lengths, resumed from the device, from the host and from a store: the same bytes and logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hicache.bench.exact.plan import Plan
from hicache.bench.exact.results import Check
from hicache.bench.exact.rig import Pass, Rig, relative_difference, rigged
from hicache.bench.exact.subject import Subject, random_tokens
from hicache.units import Tier

_TRUNK_SEED, _SUFFIX_SEED, _FILLER_SEED = 1, 1000, 2


@dataclass(frozen=True, slots=True)
class Trip:
    """A prompt whose first `length` tokens were computed before; `cold` in one go, else from the tier named."""

    length: int
    cold: Pass
    device: Pass
    host: Pass
    storage: Pass

    @property
    def cold_logits(self) -> torch.Tensor:
        """Of the tokens after `length`."""
        return self.cold.logits[self.length :]

    @property
    def moved(self) -> dict[str, Pass]:
        """What was resumed from elsewhere, by tier."""
        return {Tier.HOST.value: self.host, Tier.STORAGE.value: self.storage}

    @property
    def hits(self) -> dict[str, Pass]:
        """What was resumed, by tier."""
        return {Tier.DEVICE.value: self.device, **self.moved}


def take_trips(subject: Subject, store: Path) -> list[Trip]:
    """All lengths of the plan. The store's pages are read by a cache that has nothing else."""
    plan = subject.plan
    prompts = _prompts(plan)
    with rigged(subject, store) as rig:
        rig.compute(trunk(plan), plan.hits, snapshots=plan.hits, keep=True)
        cold = [_cold(rig, prompt, length, plan) for prompt, length in prompts]
        device = [rig.compute(prompt) for prompt, _ in prompts]
        host = list(_from_host(rig, prompts))
    with rigged(subject, store) as rig:
        rig.compute(random_tokens(len(trunk(plan)), _FILLER_SEED), plan.hits, snapshots=plan.hits, keep=True)
        storage = list(_from_store(rig, prompts))
    lengths = [length for _, length in prompts]
    return [Trip(*parts) for parts in zip(lengths, cold, device, host, storage, strict=True)]


def trunk(plan: Plan) -> list[int]:
    """What all prompts begin with."""
    return random_tokens(plan.hits[-1] + 3, _TRUNK_SEED)


def _prompts(plan: Plan) -> list[tuple[list[int], int]]:
    """Prompts that leave the trunk at each length: the token after it is another one."""
    found = []
    for index, length in enumerate(plan.hits):
        base = trunk(plan)
        suffix = random_tokens(plan.suffixes[index % len(plan.suffixes)], _SUFFIX_SEED + index)
        suffix[0] = base[length] + 1
        found.append((base[:length] + suffix, length))
    return found


def _cold(rig: Rig, prompt: Sequence[int], length: int, plan: Plan) -> Pass:
    """Cut where the trunk was cut: bits of recurrent state depend on that."""
    cuts = [hit for hit in plan.hits if hit <= length]
    return rig.compute(prompt, cuts, snapshots=cuts, salt=f"cold {length}")


def _from_host(rig: Rig, prompts: Sequence[tuple[list[int], int]]) -> Iterator[Pass]:
    for prompt, _ in prompts:
        rig.empty(Tier.DEVICE)
        yield rig.compute(prompt)


def _from_store(rig: Rig, prompts: Sequence[tuple[list[int], int]]) -> Iterator[Pass]:
    for prompt, _ in prompts:
        rig.empty(Tier.DEVICE)
        rig.empty(Tier.HOST)
        yield rig.compute(prompt, stored=True)


def check_bytes(trips: Sequence[Trip]) -> Check:
    """Every byte that a hit needs, in every pool, came back from the host and from the store, into other slots."""
    compared = 0
    failures: list[str] = []
    for trip in trips:
        for tier, came in trip.moved.items():
            for pool, before in trip.device.held.items():
                where = f"{pool} after a hit of {trip.length} tokens from {tier}"
                after = came.held.get(pool)
                if after is None or after.content.shape != before.content.shape:
                    failures.append(f"{where}: other pages than before")
                    continue
                compared += before.content.nbytes
                different = int(np.count_nonzero(after.content != before.content))
                if different:
                    failures.append(f"{where}: {different} of {before.content.nbytes} bytes differ")
                if (after.slots == before.slots).any():
                    failures.append(f"{where}: some of its slots are those from before")
    return Check.judged("bytes", f"{compared:,}", failures, compared_bytes=compared)


def check_hits(trips: Sequence[Trip]) -> Check:
    """The same logits, bit for bit, cold and from every tier, at the same split."""
    same = tried = 0
    worst = 0.0
    failures: list[str] = []
    for trip in trips:
        for tier, came in trip.hits.items():
            tried += 1
            where = f"a hit of {trip.length} tokens from {tier}"
            if came.cached[tier] != trip.length or came.start != trip.length:
                failures.append(f"{where}: only {dict(came.cached)} were cached")
                continue
            if torch.equal(came.logits, trip.cold_logits):
                same += 1
                continue
            apart = relative_difference(came.logits, trip.cold_logits)
            worst = max(worst, apart)
            failures.append(f"{where}: logits differ by {apart:.1e} of the largest")
    return Check.judged("hits", f"{same} of {tried}", failures, equal=same, tried=tried, largest_difference=worst)
