"""A pool that joins a built cache works as if it had been there from the start, or nothing has changed."""

from dataclasses import replace

import numpy as np
import pytest

from hicache.builder import ModelDescription, PoolDescription, make_sidecar
from hicache.cache import SidecarPoolSpec
from hicache.coverage import Checkpoint, Full, Window
from hicache.errors import ClosedError, ConfigError, InvariantError
from hicache.storage import PageStore
from hicache.storage.memory import MemoryBackend
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import DERIVED, ONE_POOL, PAGE, THREE_POOLS, World, geometry, namespace, tokens

PROMPT = tokens(*range(5 * PAGE + 1))

INDEXER = PoolDescription("indexer", geometry(1, 7), (1,), derived_from="kv")
WIDE = PoolDescription("wide", geometry(1, 2), (0,), coverage=Window(2 * PAGE + 1))
OWN = PoolDescription("own", geometry(2, 3), (0, 2))
STATE = PoolDescription("state2", geometry(1, 5, tokens=1), (1,), coverage=Checkpoint())


class Shelf(MemoryBackend):
    """A memory store that outlives its attachments, as one on disk does, and knows which pools it was given.

    It takes pages only from memory that it was told of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pools: set[str] = set()
        self.arenas: list[tuple[int, int]] = []

    def register(self, arenas):
        self.arenas += [(start := address_of(arena), start + arena.nbytes) for arena in arenas]

    def write(self, keys, values):
        self.pools |= {key.pool for key in keys}
        for _, page in values:
            start = address_of(page)
            assert any(first <= start and start + page.nbytes <= last for first, last in self.arenas)
        return super().write(keys, values)

    def close(self) -> None:
        """Keeps everything."""


def address_of(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def world_of(base: ModelDescription, *late: PoolDescription, attach: str = "never", **settings) -> World:
    """A world whose model got some of its pools after the build."""
    world = World(base, executor=HandExecutor(), **settings)
    backend = Shelf()
    if attach == "before":
        world.cache.attach_storage_backend(PageStore(backend))
    for pool in late:
        world.cache.register_sidecar_pool(*make_sidecar(world.cache, pool))
    if attach == "after":
        world.cache.attach_storage_backend(PageStore(backend))
    world.backend = backend
    world.model = replace(base, pools=(*base.pools, *late))
    world.namespace = namespace(world.model)
    return world


def settled(world: World) -> None:
    world.executor.settle(world.cache.poll)


@pytest.mark.parametrize("attach", ["before", "after"])
@pytest.mark.parametrize(
    ("base", "late"),
    [(ONE_POOL, (INDEXER,)), (ONE_POOL, (OWN, WIDE)), (THREE_POOLS, (STATE, INDEXER)), (DERIVED, (OWN,))],
)
def test_a_late_pool_goes_through_all_tiers(base, late, attach):
    world = world_of(base, *late, attach=attach)
    world.serve(PROMPT)
    settled(world)
    assert world.backend.pools == {pool.name for pool in world.model.pools}
    world.cache.evict(Tier.DEVICE)
    settled(world)
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    settled(world)
    assert load.result() == 5 * PAGE
    world.check(match)
    world.cache.release(match)
    world.cache.evict(Tier.DEVICE)
    world.cache.evict(Tier.HOST)
    assert world.cached(PROMPT) == (0, 0)
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    settled(world)
    match = world.cache.match_prefix(PROMPT, world.namespace, ticket)
    load = world.cache.load_back(match)
    settled(world)
    assert load.result() == 5 * PAGE
    assert match.cached_tokens["storage"] == 5 * PAGE
    world.check(match)
    world.cache.release(match)
    world.idle()
    world.cache.close()


def test_when_storage_is_attached_makes_no_difference():
    stats = []
    for attach in ("before", "after"):
        world = world_of(THREE_POOLS, INDEXER, OWN, attach=attach)
        world.serve(PROMPT)
        settled(world)
        stats.append(world.cache.stats())
        world.cache.close()
    assert stats[0] == stats[1]


def test_late_and_from_the_start_are_the_same():
    built = World(replace(ONE_POOL, pools=(*ONE_POOL.pools, INDEXER, OWN)), executor=HandExecutor())
    late = world_of(ONE_POOL, INDEXER, OWN)
    assert built.namespace == late.namespace
    for world in (built, late):
        world.serve(PROMPT)
        settled(world)
    assert built.cache.stats() == late.cache.stats()
    tree = late.cache.controller.state.tree
    assert [pool.name for pool in tree.pools] == [pool.name for pool in built.cache.controller.state.tree.pools]


def test_a_late_pool_cuts_the_hit_where_it_has_nothing():
    world = world_of(ONE_POOL, WIDE)
    match = world.prefill(PROMPT)
    tree = world.cache.controller.state.tree
    eviction = tree.detach(tree.span(tree.match(world.namespace.fingerprint, PROMPT), 2, 3), Tier.DEVICE, ["wide"])
    assert eviction.count("wide", Tier.DEVICE) == 1
    world.cache.controller.state.free_eviction(eviction)
    world.cache.release(match)
    assert world.cached(PROMPT)[0] == 5 * PAGE, "the window at the end is whole"
    assert world.cached(PROMPT[: 4 * (4 * PAGE + 1)])[0] == 2 * PAGE, "the window after 3 and 4 pages is not"
    world.cache.audit()


def test_a_pool_with_its_own_slots_is_counted_and_audited():
    world = world_of(ONE_POOL, OWN)
    assert {(pool.pool, pool.slots) for pool in world.cache.stats().pools} == {
        ("kv", 16),
        ("kv", 32),
        ("own", 16),
        ("own", 32),
    }
    match = world.prefill(PROMPT)
    taken = world.cache._device_allocators["own"].alloc(1)
    with pytest.raises(InvariantError, match="'own', device"):
        world.cache.audit()
    world.cache._device_allocators["own"].free(taken)
    world.cache.audit()
    world.cache.release(match)


def test_reserved_slots_of_a_late_pool_are_never_handed_out():
    world = World(executor=HandExecutor())
    spec, entry = make_sidecar(world.cache, OWN)
    world.cache.register_sidecar_pool(replace(spec, reserved_slots=3), entry)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.cache.allocate(match, 13 * PAGE)["own"].min() == 3
    assert world.cache.allocate(match, 1) is None
    world.cache.release(match)
    world.cache.audit()


def unchanged(world: World) -> None:
    """The cache is what it was: it serves, and knows no other pool."""
    assert [entry.name for entry in world.cache.controller.mem_pool_host.entries] == ["kv"]
    assert [pool.name for pool in world.cache.controller.state.tree.pools] == ["kv"]
    assert {pool.pool for pool in world.cache.stats().pools} == {"kv"}
    world.serve(PROMPT)
    settled(world)
    world.idle()


def changes(spec=None, entry=None):
    return spec or {}, entry or {}


@pytest.mark.parametrize(
    ("pool", "made", "message"),
    [
        (OWN, changes(spec={"name": "other"}), "the spec is of pool 'other', the entry of 'own'"),
        (OWN, changes(entry={"coverage": Window(3)}), r"pool 'own': the spec says Full\(\), the entry Window"),
        (OWN, changes(entry={"derived_from": "kv"}), "'own': the spec says indices_from_pool=None, the entry derived"),
        (OWN, changes(entry={"is_primary_index_anchor": True}), "pool 'own' joins as a sidecar"),
        (
            OWN,
            changes(entry={"device_alloc_fn": lambda count: None}),
            "pool 'own': its device slots are handed out by the cache",
        ),
        (OWN, changes(spec={"reserved_slots": 16}), "'own' has 16 device slots and reserved_slots=16"),
        (OWN, changes(entry={"layer_mapper": lambda layer: None}), "layer mapper of pool 'own'"),
        (
            INDEXER,
            changes(spec={"reserved_slots": 1}),
            "'indexer' has reserved_slots=1, but lives at the slots of 'kv'",
        ),
        (INDEXER, changes(spec={"coverage": Window(3)}), r"'indexer' lives at the slots of 'kv', .* is Full\(\)"),
        (
            INDEXER,
            changes(spec={"indices_from_pool": "nosuch"}, entry={"derived_from": None}),
            "'nosuch', which is not registered",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(pool, made, message):
    world = World(executor=HandExecutor())
    spec, entry = make_sidecar(world.cache, pool)
    with pytest.raises(ConfigError, match=message):
        world.cache.register_sidecar_pool(replace(spec, **made[0]), replace(entry, **made[1]))
    entry.host_pool.close()
    unchanged(world)


def test_an_entry_need_not_repeat_its_spec():
    world = World(executor=HandExecutor())
    spec, entry = make_sidecar(world.cache, WIDE)
    world.cache.register_sidecar_pool(spec, replace(entry, coverage=Full()))
    assert world.cache.controller.mem_pool_host.get_entry("wide").coverage == WIDE.coverage
    spec, entry = make_sidecar(world.cache, INDEXER)
    world.cache.register_sidecar_pool(spec, replace(entry, derived_from=None))
    assert world.cache.controller.mem_pool_host.get_entry("indexer").derived_from == "kv"


def test_of_several_pools_all_join_or_none():
    world = World(executor=HandExecutor())
    good, bad = make_sidecar(world.cache, OWN), make_sidecar(world.cache, INDEXER)
    with pytest.raises(ConfigError, match="layer mapper of pool 'indexer'"):
        world.cache.register_hicache_draft_pools([good, (bad[0], replace(bad[1], layer_mapper=lambda layer: None))])
    with pytest.raises(ConfigError, match="pool 'own' is not registered"):
        world.cache.controller.mem_pool_host.get_entry("own")
    unchanged(world)
    world = World(executor=HandExecutor())
    below = PoolDescription("below", geometry(1, 2), (0,))
    made = [make_sidecar(world.cache, pool) for pool in (OWN, below)]
    made[1] = (SidecarPoolSpec("below", indices_from_pool="own"), made[1][1])
    world.cache.register_hicache_draft_pools(made)
    world.cache.register_hicache_draft_pools([])
    group = world.cache.controller.mem_pool_host
    assert [(entry.name, entry.derived_from) for entry in group.entries] == [
        ("kv", None),
        ("own", None),
        ("below", "own"),
    ]


def test_after_the_first_slot_it_is_too_late():
    world = World(executor=HandExecutor())
    made = make_sidecar(world.cache, OWN)
    world.serve(PROMPT)
    settled(world)
    with pytest.raises(ConfigError, match="pool 'own' comes too late: slots were handed out already"):
        world.cache.register_sidecar_pool(*made)
    unchanged(world)


def test_an_open_request_was_planned_without_it():
    world = World(executor=HandExecutor())
    made = make_sidecar(world.cache, OWN)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    with pytest.raises(ConfigError, match="pool 'own' comes too late: 1 matches are open"):
        world.cache.register_sidecar_pool(*made)
    world.cache.release(match)
    world.cache.register_sidecar_pool(*made)


def test_a_prefetch_under_way_was_planned_without_it():
    world = World(executor=HandExecutor(), backend=Shelf())
    made = make_sidecar(world.cache, OWN)
    world.cache.prefetch(PROMPT, world.namespace)
    with pytest.raises(ConfigError, match=r"pools \['own'\] come too late: a prefetch is under way"):
        world.cache.register_sidecar_pool(*made)
    settled(world)
    world.cache.register_sidecar_pool(*made)


def test_a_closed_cache_takes_no_pool_and_an_open_one_closes_it():
    world = World(executor=HandExecutor())
    spec, entry = make_sidecar(world.cache, OWN)
    world.cache.register_sidecar_pool(spec, entry)
    world.cache.close()
    with pytest.raises(ClosedError):
        _ = entry.host_pool.pages
    with pytest.raises(ClosedError):
        world.cache.register_sidecar_pool(spec, entry)


def test_the_storage_pool_stays_the_anchors():
    world = world_of(ONE_POOL, OWN)
    controller = world.cache.controller
    assert controller.storage_host_pool is controller.mem_pool_host.get_pool("kv")
    assert controller.mem_pool_host.anchor_entry.name == "kv"
