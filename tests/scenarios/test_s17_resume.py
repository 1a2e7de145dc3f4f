"""S17: a request leaves, more of its pages get cached meanwhile, it comes back: what it resumes is no hit."""

import pytest

from hicache.units import Tier
from tests.cache.retracting import PROMPT, all_is_given_back, away, empty_device, restored, running
from tests.world import KINDS, PAGE, World, tokens


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("model", sorted(KINDS))
def test_counts_stay_what_they_were_and_below_the_prompt(model, policy):
    world = World(KINDS[model], write_policy=policy, device_pages=24)
    world.serve(PROMPT[: 4 * (2 * PAGE + 1)])
    match = running(world)
    cached = dict(match.cached_tokens)
    assert sum(cached.values()) < len(PROMPT) // 4
    retracted = away(world, match)
    own = world.cache.stats()
    longer = world.prefill(world.texts[match] + tokens(7, 8, 9, 10))
    theirs = world.cache.stats()
    world.cache.release(longer)
    empty_device(world)
    assert restored(world, retracted) == match.length_tokens
    world.check(match)
    after = world.cache.stats()
    assert dict(match.cached_tokens) == cached
    assert (after.lookup_tokens, after.hit_tokens) == (theirs.lookup_tokens, theirs.hit_tokens)
    assert theirs.lookup_tokens - own.lookup_tokens == len(longer.tokens) // 4
    assert 0 <= after.hit_rate <= 1
    assert all(count >= 0 for count in after.counters.values())
    assert world.decode(match, world.texts[match] + tokens(*range(900, 900 + 2 * PAGE)), checkpoint=True)
    world.check(match)
    assert dict(match.cached_tokens) == cached
    assert all(after.hit_tokens[tier] == world.cache.stats().hit_tokens[tier] for tier in Tier)
    world.cache.release(match)
    all_is_given_back(world)
