"""S37: where a prompt's end can't be resumed, an earlier snapshot is, or nothing: never a state of other tokens."""

import pytest

from hicache.storage.memory import MemoryBackend
from hicache.units import Tier
from tests.world import KINDS, PAGE, World, tokens

PROMPT = tokens(*range(6 * PAGE))
STATEFUL = ["three", "window and state", "state and window", "state", "everything"]
WINDOWED = ["three", "chunked", "window", "window and state", "state and window", "everything"]


class Shelf(MemoryBackend):
    """Outlives its caches, and takes no page of some pools."""

    def __init__(self, *refused: str) -> None:
        super().__init__()
        self.refused = refused
        self.has: set[str] = set()

    def write(self, keys, values):
        kept = [number for number, key in enumerate(keys) if key.pool not in self.refused]
        self.has.update(keys[number].pool for number in kept)
        stored = super().contains(keys) & False
        if kept:
            stored[kept] = super().write([keys[number] for number in kept], [values[number] for number in kept])
        return stored

    def close(self) -> None:
        """Keeps everything."""


@pytest.mark.parametrize("model", STATEFUL)
@pytest.mark.parametrize("snapshots", [[6], [3, 6], [5, 6], [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_a_prompt_that_is_cached_whole_resumes_at_an_earlier_snapshot(model, snapshots, tier):
    """Its end is known, but at least its last token must be computed, and a state can't be cut back by a token."""
    world = World(KINDS[model], device_pages=24, host_pages=24)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    for pages in snapshots:
        assert world.decode(match, PROMPT[: 4 * pages * PAGE], checkpoint=True)
    world.cache.release(match)
    world.settle()
    if tier is Tier.HOST:
        world.cache.evict(Tier.DEVICE)
    expected = max([pages for pages in snapshots if pages < 6], default=0) * PAGE
    for _ in range(2):
        again = world.cache.match_prefix(PROMPT, world.namespace)
        world.finish_load(again)
        assert sum(again.cached_tokens.values()) == again.length_tokens == expected
        world.check(again)
        assert world.decode(again, PROMPT, checkpoint=True)
        world.check(again)
        world.cache.release(again)
        world.settle()
    longer = world.cache.match_prefix(PROMPT + tokens(1), world.namespace)
    world.finish_load(longer)
    assert longer.length_tokens == 6 * PAGE
    world.check(longer)
    world.cache.release(longer)
    world.idle()


@pytest.mark.parametrize("model", WINDOWED)
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_a_prefix_whose_window_has_moved_on_is_not_cut_out_of_it(model, tier):
    """The window's pages at the crop are gone, or partly: the hit is where a whole window is; its bytes are right."""
    world = World(KINDS[model], device_pages=24, host_pages=24)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    for pages in range(1, 7):
        assert world.decode(match, PROMPT[: 4 * pages * PAGE], checkpoint=True)
    for place in (Tier.DEVICE, Tier.HOST):
        world.settle()
        world.cache.evict(place, pool="swa")
    world.settle()
    world.cache.evict(Tier.HOST, pool="swa")
    world.cache.release(match)
    if tier is Tier.HOST:
        world.settle()
        world.cache.evict(Tier.DEVICE)
    assert world.cached(PROMPT + tokens(1))[1] == 6 * PAGE
    hits = [world.cached(PROMPT[: 4 * (pages * PAGE + 1)])[1] // PAGE for pages in range(6)]
    wide = max(len(pool.coverage.required(6, PAGE)) for pool in world.model.pools if pool.name == "swa")
    assert hits == [0] * 6 if wide > 1 else hits[:5] == [0] * 5
    cut = world.prefill(PROMPT[: 4 * (4 * PAGE + 1)])
    assert sum(cut.cached_tokens.values()) == 0
    world.check(cut)
    world.cache.release(cut)
    world.settle()
    world.idle()


@pytest.mark.parametrize("model", [*STATEFUL, "chunked", "derived", "latent"])
def test_a_store_that_has_only_some_pools_gives_no_hit(model):
    """Every pool but the anchor in turn, and all at once: the store answers, and nothing of it is used."""
    pools = [pool.name for pool in KINDS[model].pools]
    for refused in [(pool,) for pool in pools] + [tuple(pools[1:])]:
        backend = Shelf(*refused)
        first = World(KINDS[model], backend=backend)
        first.serve(PROMPT + tokens(1))
        first.settle()
        assert backend.has == set(pools) - set(refused)
        first.cache.close()
        world = World(KINDS[model], backend=backend)
        ticket = world.cache.prefetch(PROMPT + tokens(1), world.namespace)
        world.settle()
        assert ticket.done
        assert world.cached(PROMPT + tokens(1)) == (0, 0), refused
        assert world.cache.stats().counters["fetch_pages"] == 0
        match = world.prefill(PROMPT + tokens(1), ticket)
        assert sum(match.cached_tokens.values()) == 0
        world.check(match)
        world.cache.release(match)
        world.settle()
        world.idle()
