"""S35: a hybrid's hit reaches the last snapshot within what is shared; no snapshot has seen a rejected token."""

import pytest

from hicache.builder import ModelDescription
from hicache.cache import Match
from hicache.storage import PageStore
from hicache.storage.memory import MemoryBackend
from hicache.units import HOLE, Tier
from tests.world import KINDS, PAGE, World, tokens

HYBRIDS = ["three", "window and state", "state and window", "state", "everything"]
SHARED = 10


def text(pages: int, tail: int = 0, more: int = 1) -> bytes:
    """A prompt of `pages` pages that all prompts begin with, `tail` of its own, and `more` tokens."""
    own = range(1000 * (tail + 1), 1000 * (tail + 1) + (PAGE * 3 if tail else 0) + more)
    return tokens(*range(pages * PAGE), *own)


def states(model: ModelDescription) -> list[str]:
    return [pool.name for pool in model.pools if pool.name in ("state", "conv")]


def serve(world: World, prompt: bytes) -> Match:
    """As an engine does: a snapshot where the prompt leaves what is known, and one at its end."""
    match = world.cache.match_prefix(prompt, world.namespace)
    world.finish_load(match)
    world.check(match)
    if match.known_tokens > match.length_tokens:
        assert world.decode(match, prompt[: 4 * match.known_tokens], checkpoint=True)
    assert world.decode(match, prompt, checkpoint=True)
    world.check(match)
    world.cache.release(match)
    world.settle()
    return match


def lost(world: World) -> int:
    return world.cache.stats().counters["kv_hit_without_state"]


@pytest.fixture(params=HYBRIDS)
def world(request) -> World:
    return World(KINDS[request.param], device_pages=60, host_pages=60)


@pytest.mark.parametrize("tier", list(Tier))
def test_the_same_prompt_twice(world: World, tier: Tier):
    world.cache.attach_storage_backend(PageStore(MemoryBackend()))
    serve(world, text(SHARED))
    for lower in (Tier.DEVICE, Tier.HOST)[: list(Tier).index(tier)]:
        world.cache.evict(lower)
    ticket = world.cache.prefetch(text(SHARED), world.namespace)
    world.settle()
    match = world.cache.match_prefix(text(SHARED), world.namespace, ticket)
    world.finish_load(match)
    world.check(match)
    assert match.cached_tokens == {"device": 0, "host": 0, "storage": 0} | {tier.value: SHARED * PAGE}
    assert lost(world) == 0
    world.cache.release(match)
    world.idle()


def test_a_shared_beginning_and_tails_of_their_own(world: World):
    """The second prompt finds no snapshot where it parts; it leaves one there, which all others resume at."""
    hits = [sum(serve(world, text(SHARED, tail)).cached_tokens.values()) for tail in (1, 2, 3, 4)]
    assert hits == [0, 0, SHARED * PAGE, SHARED * PAGE]
    has_tokens = any(pool.name in ("kv", "swa") for pool in world.model.pools)
    assert lost(world) == (SHARED * PAGE if has_tokens else 0)
    serve(world, text(SHARED))
    assert sum(serve(world, text(SHARED, 5)).cached_tokens.values()) == SHARED * PAGE
    world.idle()


def test_a_branch_in_the_middle(world: World):
    """The hit is the last snapshot before the branch: more than 0, no more than what is shared."""
    match = world.cache.match_prefix(text(SHARED), world.namespace)
    for stop in (4, 7, SHARED):
        assert world.decode(match, text(stop, more=0), checkpoint=True)
    world.cache.release(match)
    world.settle()
    for branch, hit in ((9, 7), (7, 7), (5, 4), (4, 4), (3, 0)):
        prompt = text(branch, tail=branch)
        assert world.cached(prompt) == (hit * PAGE, hit * PAGE)
        match = world.prefill(prompt)
        assert match.cached_tokens["device"] == hit * PAGE
        world.check(match)
        world.cache.release(match)
    world.settle()
    world.idle()


@pytest.mark.parametrize("model", ["three", "everything"])
def test_few_snapshots_are_a_budget_of_their_own(model):
    """Of more snapshots than there are slots the ones used last stay, with all KV; the hit is what they allow."""
    world = World(KINDS[model], device_pages=80, host_pages=80)
    group = world.cache.controller.mem_pool_host
    for tier in (Tier.DEVICE, Tier.HOST):
        for pool in states(world.model):
            free = world.cache.controller.state.available(pool, tier)
            group.reserve({pool: free - 4}, tier).commit()
    prompts = [tokens(*range(1000 * number, 1000 * number + 4 * PAGE + 1)) for number in range(1, 7)]
    for prompt in prompts:
        world.serve(prompt)
        world.serve(prompts[0])
        world.settle()
    kv = next(pool for pool in world.cache.stats().pools if pool.pool == "kv" and pool.tier is Tier.DEVICE)
    assert kv.cached == 6 * 4
    hits = [world.cached(prompt)[0] for prompt in prompts]
    assert hits[0] == hits[-1] == 4 * PAGE, "the one that is used all the time, and the newest"
    assert 0 in hits
    assert hits.count(4 * PAGE) <= 4
    before = lost(world)
    world.serve(prompts[hits.index(0)])
    assert lost(world) == before + 4 * PAGE


@pytest.mark.parametrize("accepted", range(6))
def test_no_snapshot_has_seen_a_rejected_token(world: World, accepted):
    """Five drafted tokens, over a page's end, are verified at once: state and snapshots go by what was accepted."""
    prompt = text(2, more=2)
    match = world.cache.match_prefix(prompt, world.namespace)
    assert world.decode(match, prompt, checkpoint=True)
    drafted = prompt + tokens(*range(500, 505))
    assert world.allocate(match, 5, checkpoint=True)
    kept = drafted[: len(prompt) + 4 * accepted]
    world.compute(match, kept)
    world.cache.insert(match, kept)
    world.check(match)
    if len(kept) // 4 < 3 * PAGE:
        assert match.slots(states(world.model)[0])[2] in match.lent[states(world.model)[0]], "not shared"
        world.cache.drop_checkpoint(match, 3)
    world.cache.audit()
    assert world.allocate(match, len(kept) // 4 - match.length_tokens, checkpoint=False), "the rest was taken back"
    assert match.length_tokens == len(kept) // 4
    snapshots = [page + 1 for page in range(match.page_count) if match.slots(states(world.model)[0])[page] != HOLE]
    assert snapshots == ([2, 3] if len(kept) // 4 >= 3 * PAGE else [2])
    answer = kept + tokens(*range(700, 700 + 2 * PAGE))
    assert world.decode(match, answer, checkpoint=True)
    world.check(match)
    world.cache.release(match)
    world.settle()
    world.cache.evict(Tier.DEVICE)
    again = world.cache.match_prefix(answer + tokens(1), world.namespace)
    world.finish_load(again)
    assert sum(again.cached_tokens.values()) == len(answer) // 4 // PAGE * PAGE
    world.check(again)
    assert world.cached(drafted + tokens(*range(9)))[1] == (3 if accepted >= 2 else 2) * PAGE
    world.cache.release(again)
    world.idle()
