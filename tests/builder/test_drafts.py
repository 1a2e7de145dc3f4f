"""A draft's pools live at the target's slots: their pages are there together, in every tier, or not at all."""

from dataclasses import replace

import numpy as np
import pytest

from hicache.builder import (
    ModelDescription,
    PoolDescription,
    SidecarMemory,
    build_kv_cache,
    full_attention,
    make_sidecar,
    maybe_register_hicache_draft,
    with_draft,
)
from hicache.config import CacheConfig
from hicache.controller import Prefetch
from hicache.coverage import Checkpoint, Full, Window
from hicache.device.array import ArrayDevicePool
from hicache.errors import ConfigError
from hicache.memory import available_memory_bytes
from hicache.pools import HostPool
from hicache.storage.memory import MemoryBackend
from hicache.units import HOLE, Tier
from tests.hand import HandExecutor
from tests.world import EVERYTHING, ONE_POOL, PAGE, STATE, STATE_AND_WINDOW, WINDOW, World, geometry, namespace, tokens

PROMPT = tokens(*range(5 * PAGE + 1))
DRAFT = ModelDescription(2, (PoolDescription("kv", geometry(2, 3), (0, 1)),))
TWO = ModelDescription(
    2,
    (
        PoolDescription("latent", geometry(2, 3), (0, 1)),
        PoolDescription("indexer", geometry(1, 2), (1,), derived_from="latent"),
    ),
)


class Shelf(MemoryBackend):
    """A memory store that outlives its attachments, as one on disk does."""

    def close(self) -> None:
        """Keeps everything."""


def drafted(target: ModelDescription = ONE_POOL, draft: ModelDescription = DRAFT, **settings) -> World:
    world = World(target, executor=HandExecutor(), **settings)
    assert maybe_register_hicache_draft(world.cache, draft)
    return world


def settled(world: World) -> None:
    world.executor.settle(world.cache.poll)


def fetched(world: World) -> int:
    """How far a prompt can be resumed with what storage has."""
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    settled(world)
    return loaded(world, ticket)


def loaded(world: World, ticket: Prefetch | None = None) -> int:
    """How far a prompt can be resumed; every byte of that is checked."""
    match = world.cache.match_prefix(PROMPT, world.namespace, ticket)
    load = world.cache.load_back(match)
    settled(world)
    length = load.result()
    world.check(match)
    world.cache.release(match)
    return length


def entries(world: World) -> dict[str, str | None]:
    return {entry.name: entry.derived_from for entry in world.cache.controller.mem_pool_host.entries}


def test_without_a_draft_nothing_happens():
    world = World(executor=HandExecutor())
    assert maybe_register_hicache_draft(world.cache, None) is False
    assert entries(world) == {"kv": None}
    assert maybe_register_hicache_draft(object(), None) is False, "whatever the cache is"


def test_another_kind_of_cache_is_told_what_to_use():
    with pytest.raises(
        NotImplementedError, match="join a UnifiedRadixCache, not a dict; build the cache with build_kv"
    ):
        maybe_register_hicache_draft({}, DRAFT)


def test_a_draft_lives_at_the_anchors_slots():
    world = drafted()
    assert entries(world) == {"kv": None, "draft": "kv"}
    world.serve(PROMPT)
    settled(world)
    world.cache.evict(Tier.DEVICE)
    assert world.cached(PROMPT) == (0, 5 * PAGE)
    assert loaded(world) == 5 * PAGE
    world.idle()
    world.cache.close()


def test_a_draft_of_several_pools_joins_whole():
    world = drafted(draft=TWO)
    assert entries(world) == {"kv": None, "draft_latent": "kv", "draft_indexer": "kv"}
    world.serve(PROMPT)
    settled(world)
    world.idle()


def test_a_config_of_transformers_is_enough():
    target = full_attention(3, 2, 8, "float32", PAGE)
    config = CacheConfig(device_size="1MiB", host_size="1MiB", page_size=PAGE)
    cache = build_kv_cache(target, config, reserved_slots=1)
    fields = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = []

    def device_pool(name, layers, slots):
        made.append((name, len(layers.layers), slots))
        return ArrayDevicePool.layer_first(name, layers, slots)

    memory = SidecarMemory(device_pool=device_pool, reserved_slots=1)
    assert maybe_register_hicache_draft(cache, fields, name="small", dtype="bfloat16", memory=memory)
    anchor, draft = cache.controller.mem_pool_host.entries
    assert made == [("small", 2, anchor.device_pool.slots)]
    assert draft.host_pool.slots == anchor.host_pool.slots
    assert draft.device_pool.geometry.layers[0][0].dtype == "bfloat16"
    cache.close()


def test_where_the_anchor_is_not_full_another_pool_may_be():
    target = replace(EVERYTHING, pools=(*EVERYTHING.pools[2:], *EVERYTHING.pools[:2]))
    world = drafted(target)
    assert world.cache.controller.mem_pool_host.anchor_entry.name == "swa"
    assert entries(world)["draft"] == "kv"


@pytest.mark.parametrize("target", [WINDOW, STATE_AND_WINDOW])
@pytest.mark.parametrize("draft", [DRAFT, TWO])
def test_where_no_pool_is_full_the_draft_has_slots_of_its_own(target, draft):
    world = drafted(target, draft)
    names = [name for name in entries(world) if name.startswith("draft")]
    group = world.cache.controller.mem_pool_host
    own = group.get_entry(names[0])
    assert (own.derived_from, own.coverage) == (None, Full())
    assert own.device_pool.slots == group.get_entry("swa").device_pool.slots
    assert [group.get_entry(name).derived_from for name in names[1:]] == names[:1] * (len(names) - 1)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.cache.allocate(match, 5 * PAGE + 1, checkpoint=True) is not None
    assert not np.any(match.slots(names[0]) == HOLE)
    world.cache.release(match)
    settled(world)
    world.cache.audit()
    world.cache.close()


def test_without_any_pool_of_pages_it_says_where_to_describe_the_draft():
    world = World(STATE, executor=HandExecutor())
    with pytest.raises(
        ConfigError, match=r"'draft' holds pages, and no pool of this cache does .* build_kv_cache gets"
    ):
        maybe_register_hicache_draft(world.cache, DRAFT)
    described = with_draft(STATE, DRAFT)
    assert described.pools[-1].derived_from is None
    World(described, executor=HandExecutor()).cache.close()


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (ModelDescription(4, (PoolDescription("kv", geometry(4, 1), (0, 1, 2, 3)),)), "has 4 layers, its target 3"),
        (
            ModelDescription(1, (PoolDescription("ssm", geometry(1, 1, tokens=1), (0,), coverage=Checkpoint()),)),
            "the draft's pool 'ssm' keeps snapshots",
        ),
        (replace(DRAFT, draft_lookahead=1), "draft_lookahead=1, and this cache was built with 0"),
        (ModelDescription(1, (PoolDescription("kv", geometry(1, 1, tokens=8), (0,)),)), "page_size=4"),
    ],
)
def test_a_draft_that_can_not_join_is_refused_before_memory_is_taken(monkeypatch, draft, message):
    world = World(executor=HandExecutor())

    def refuse(*arguments):
        raise AssertionError("memory was taken")

    monkeypatch.setattr(HostPool, "allocate", refuse)
    with pytest.raises(ConfigError, match=message):
        maybe_register_hicache_draft(world.cache, draft)
    assert entries(world) == {"kv": None}


def test_a_draft_that_comes_too_late_gives_its_memory_back():
    world = World(executor=HandExecutor(), host_pages=2000)
    world.serve(PROMPT)
    settled(world)
    large = ModelDescription(1, (PoolDescription("kv", geometry(1, 1 << 16), (0,)),))
    before = available_memory_bytes()
    with pytest.raises(ConfigError, match="pool 'draft' comes too late"):
        maybe_register_hicache_draft(world.cache, large)
    assert available_memory_bytes() > before - (100 << 20)
    assert entries(world) == {"kv": None}


def test_more_memory_than_there_is_is_refused():
    world = World(executor=HandExecutor())
    huge = ModelDescription(1, (PoolDescription("kv", geometry(1, 1 << 40), (0,)),))
    with pytest.raises(ConfigError, match=r"pool 'draft': .* asked"):
        maybe_register_hicache_draft(world.cache, huge)


def test_a_windowed_draft_keeps_all_its_pages():
    """It has the coverage of its source: pages behind its window are there, and nobody asks for them."""
    draft = ModelDescription(1, (PoolDescription("swa", geometry(1, 2), (0,), coverage=Window(5)),))
    world = drafted(draft=draft)
    assert world.cache.controller.mem_pool_host.get_entry("draft").coverage == Full()


def test_sizes_count_a_draft_that_is_described():
    described = with_draft(ONE_POOL, DRAFT)
    assert [(pool.name, pool.derived_from) for pool in described.pools] == [("kv", None), ("draft", "kv")]
    assert with_draft(ONE_POOL, replace(DRAFT, draft_lookahead=2)).draft_lookahead == 2
    world = World(described, device_pages=16, executor=HandExecutor())
    assert world.cache.stats().pools[0].slots == 16
    world.serve(PROMPT)
    settled(world)
    world.idle()


# Storage


def test_pages_of_a_cache_without_the_draft_cut_the_hit_of_one_with_it():
    """Both use the target's namespace: the target's bytes are the same, but the draft's are not there."""
    shelf = Shelf()
    plain = World(executor=HandExecutor(), backend=shelf)
    plain.serve(PROMPT)
    settled(plain)
    plain.cache.close()
    world = drafted(backend=shelf)
    assert fetched(world) == 0
    world.serve(PROMPT)
    settled(world)
    assert world.cache.stats().storage.skipped_pages == 5, "the target's pages are there already"
    world.cache.close()
    again = drafted(backend=shelf)
    assert fetched(again) == 5 * PAGE
    again.cache.close()
    plain = World(executor=HandExecutor(), backend=shelf)
    assert fetched(plain) == 5 * PAGE, "nor does it harm who has no draft"


@pytest.mark.parametrize("lost", ["kv", "draft"])
def test_where_one_part_is_missing_both_are(lost):
    class Forgetful(Shelf):
        def write(self, keys, values):
            kept = [number for number, key in enumerate(keys) if key.pool != lost or number != 2]
            stored = super().contains(keys) & False
            stored[kept] = super().write([keys[i] for i in kept], [values[i] for i in kept])
            return stored

    shelf = Forgetful()
    world = drafted(backend=shelf, batch_pages=8)
    world.serve(PROMPT)
    settled(world)
    world.cache.close()
    world = drafted(backend=shelf, batch_pages=8)
    assert fetched(world) == 2 * PAGE
    state = world.cache.controller.state
    assert state.available("kv", Tier.HOST) == 30, "a page without its draft is not kept"
    world.idle()


def test_packed_drafts_have_a_namespace_of_their_own():
    """Their bytes lie in the target's pages: pages with and without them never meet."""
    packed = replace(ONE_POOL, pools=(replace(ONE_POOL.pools[0], packed_drafts=(geometry(5, 3),)),))
    assert namespace(packed) != namespace(ONE_POOL)
    shelf = Shelf()
    for writer, reader in ((ONE_POOL, packed), (packed, ONE_POOL)):
        world = World(writer, executor=HandExecutor(), backend=shelf)
        world.serve(PROMPT)
        settled(world)
        world.cache.close()
        if reader is packed:
            world = World(reader, executor=HandExecutor(), backend=shelf)
            assert fetched(world) == 0
            assert world.cache.stats().storage.damaged_pages == 0
            world.cache.close()
    for model in (packed, ONE_POOL):
        world = World(model, executor=HandExecutor(), backend=shelf)
        assert fetched(world) == 5 * PAGE
        world.cache.close()


def test_the_source_must_be_there():
    world = World(executor=HandExecutor())
    with pytest.raises(ConfigError, match="'x' is derived from 'nosuch', which is not registered; there are"):
        make_sidecar(world.cache, PoolDescription("x", geometry(1, 1), (0,), derived_from="nosuch"))
    with pytest.raises(ConfigError, match="'x' holds snapshots, and no pool of this cache does"):
        make_sidecar(world.cache, PoolDescription("x", geometry(1, 1, tokens=1), (0,), coverage=Checkpoint()))
