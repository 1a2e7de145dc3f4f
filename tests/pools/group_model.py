"""A plain model of a group's slots: counts in dicts, and what reclaiming does to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.units import Tier

Side = tuple[str, Tier]


class ReclaimError(Exception):
    """What an evict function raises when it is told to fail."""


@dataclass
class Plan:
    """How the evict functions of one run behave: where they reach, and which fail or do nothing."""

    reach: dict[str, tuple[str, ...]] = field(default_factory=dict)
    raises_before: set[Side] = field(default_factory=set)
    raises_after: set[Side] = field(default_factory=set)
    idle: set[Side] = field(default_factory=set)


@dataclass
class Outcome:
    """What a reservation must do: which evictions it asks for, what is cached and free after, how it ends."""

    asked: list[tuple[Side, int]]
    free: dict[Side, int]
    cached: dict[Side, int]
    raises: bool
    shortage: bool


def evicted(
    side: Side, count: int, plan: Plan, free: Mapping[Side, int], cached: Mapping[Side, int]
) -> dict[Side, int]:
    """How many cached slots go, per side, when `side` is asked to have `count` free."""
    name, tier = side
    gone = {side: min(max(0, count - free[side]), cached[side])}
    for other in plan.reach.get(name, ()):
        gone[other, tier] = min(1, cached[other, tier])
    return gone


def reserve(
    demand: Mapping[str, int], tier: Tier, order: list[str], plan: Plan, free: dict[Side, int], cached: dict[Side, int]
) -> Outcome:
    """The rules of a reservation, over counts alone."""
    outcome = Outcome([], dict(free), dict(cached), raises=False, shortage=False)
    if any(count > free[name, tier] + cached[name, tier] for name, count in demand.items()):
        outcome.shortage = True
        return outcome
    for name in order:
        side = (name, tier)
        if name not in demand or outcome.free[side] >= demand[name]:
            continue
        outcome.asked.append((side, demand[name]))
        if side in plan.raises_before:
            outcome.raises = True
            return outcome
        if side not in plan.idle:
            for gone, count in evicted(side, demand[name], plan, outcome.free, outcome.cached).items():
                outcome.free[gone] += count
                outcome.cached[gone] -= count
        if side in plan.raises_after:
            outcome.raises = True
            return outcome
    outcome.shortage = any(outcome.free[name, tier] < count for name, count in demand.items())
    if not outcome.shortage:
        for name, count in demand.items():
            outcome.free[name, tier] -= count
    return outcome
