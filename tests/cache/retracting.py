"""What tests of retraction do: a request in the middle of its answer leaves, and comes back."""

import numpy as np

from hicache.cache import Load, Match, Retracted
from hicache.units import Tier
from tests.world import PAGE, World, tokens

PROMPT = tokens(*range(4 * PAGE + 1))
ANSWER = PROMPT + tokens(*range(500, 500 + 4 * PAGE))
OTHER = tokens(*range(1000, 1000 + 4 * PAGE + 1))


def pools(world: World) -> tuple[str, ...]:
    return world.cache.controller.state.pools


def free(world: World, tier: Tier) -> dict[str, int]:
    return {pool.pool: pool.free for pool in world.cache.stats().pools if pool.tier is tier}


def count(world: World, name: str) -> int:
    return world.cache.stats().counters[f"retraction_{name}"]


def running(world: World, length: int = 5 * PAGE + 2) -> Match:
    """A request in the middle of its answer, with live states, a snapshot of its own and a partial last page."""
    match = world.prefill(PROMPT)
    assert world.decode(match, ANSWER[: 4 * length], checkpoint=True, checkpoints=False)
    return match


class Account:
    """What must be as before, whatever slots it is in."""

    def __init__(self, world: World, match: Match) -> None:
        self.slots = {pool: match.slots(pool).copy() for pool in pools(world)}
        self.facts = (match.length_tokens, match.page_count, dict(match.cached_tokens), sorted(match.live_slots))
        self.lent = {pool: len(run) for pool, run in match.lent.items()}

    def is_in_other_slots(self, world: World, match: Match) -> None:
        assert self.facts == Account(world, match).facts
        for pool, lent in match.lent.items():
            assert len(lent) == self.lent[pool] or count(world, "spilled")
            if len(lent):
                assert not np.array_equal(lent, self.slots[pool][-len(lent) :])


def away(world: World, match: Match) -> Retracted:
    retracted = world.cache.retraction_backup(match)
    assert retracted is not None
    world.cache.audit()
    return retracted


def restored(world: World, retracted: Retracted) -> int:
    """Ask until the request is back; what the load says."""
    load: Load | None = None
    for _ in range(200):
        load = world.cache.retraction_restore(retracted)
        world.cache.audit()
        if load is not None:
            break
        world.cache.poll()
    assert load is not None
    for _ in range(20):
        world.cache.poll()
    return load.result()


def take_low_slots(world: World) -> Match:
    """Whoever comes gets the slots that were freed first."""
    other = world.cache.match_prefix(tokens(9, 9, 9), world.namespace)
    assert world.allocate(other, PAGE + 1)
    return other


def empty_device(world: World) -> None:
    """Every page that may leave the device does; pages that the host lacks are written back first."""
    world.cache.evict(Tier.DEVICE)
    world.settle()
    world.cache.evict(Tier.DEVICE)


def all_is_given_back(world: World) -> None:
    world.settle()
    world.idle()
    for pool in world.cache.stats().pools:
        assert world.cache.controller.state.room(pool.pool, pool.tier) == pool.slots, pool
