"""A flush takes everything in scope out of every tier: what is under way brings nothing back, what runs goes on."""

import pytest

from hicache.cache import Flush, Flushed
from hicache.errors import InUseError, InvariantError
from hicache.keys import Namespace
from hicache.storage import Cleared, PageStore, StorageKey
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import Fault, FaultyBackend, HeldBackend, Operation
from hicache.transfer import Backup, Clear, Fetch, Load, Query, Store, ThreadExecutor
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import MODELS, PAGE, World, namespace, tokens

PROMPT = tokens(*range(6 * PAGE + 1))
LONGER = tokens(*range(9 * PAGE + 1))


class Shelf(MemoryBackend):
    """Outlives the caches that use it."""

    def close(self) -> None:
        """Keeps everything."""


def world_of(model: str = "one", backend: Shelf | None = None, **settings) -> tuple[World, HandExecutor, Shelf]:
    shelf, hand = backend or Shelf(), HandExecutor()
    return World(MODELS[model], executor=hand, backend=shelf, device_pages=32, **settings), hand, shelf


def serve(world: World, hand: HandExecutor, prompt: bytes = PROMPT, owner: Namespace | None = None) -> dict[str, int]:
    """Serve a prompt with all that every tier has of it; returns its cached tokens."""
    world.namespace = owner or world.namespace
    ticket = world.cache.prefetch(prompt, world.namespace)
    hand.settle(world.cache.poll)
    match = world.cache.match_prefix(prompt, world.namespace, ticket)
    load = world.cache.load_back(match)
    hand.settle(world.cache.poll)
    load.result()
    world.check(match)
    cached = dict(match.cached_tokens)
    assert world.allocate(match, len(prompt) // 4 - match.length_tokens)
    world.compute(match, prompt)
    world.cache.insert(match, prompt)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    return cached


def forget(world: World, *tiers: Tier) -> None:
    for tier in tiers:
        world.cache.evict(tier)


def flushed(world: World, hand: HandExecutor, owner: Namespace | None = None, *, force: bool = False) -> Flushed:
    """Flush to the end; from now on other bytes are right."""
    flush = world.cache.flush(owner, force=force)
    world.generation += 1
    hand.settle(world.cache.poll)
    assert flush.done
    return flush.result()


NOTHING = {"device": 0, "host": 0, "storage": 0}


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("gone", [(), (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)])
def test_s26_nothing_is_cached_in_any_tier_after_a_flush(model, gone):
    world, hand, shelf = world_of(model)
    serve(world, hand)
    forget(world, *gone)
    result = flushed(world, hand)
    world.idle()
    pages = sum(1 for pool in MODELS[model].pools if pool.derived_from is None)
    for tier, cleared in ((Tier.DEVICE, result.device), (Tier.HOST, result.host)):
        assert (cleared.pages > 0) == (tier not in gone)
        assert (cleared.size_bytes > 0) == (tier not in gone)
    assert result.storage.pages > pages
    assert result.problems == ()
    assert shelf.used_bytes == 0
    assert serve(world, hand) == NOTHING
    assert sum(serve(world, hand).values()) == 6 * PAGE


def test_the_reply_counts_pages_and_bytes_by_tier():
    world, hand, _ = world_of()
    serve(world, hand)
    slot_bytes = MODELS["one"].slot_bytes
    result = flushed(world, hand)
    assert result.device == result.host == Cleared(6, 6 * slot_bytes)
    assert result.storage == Cleared(6, 6 * (slot_bytes + 256))


def test_only_the_namespace_that_is_named_goes():
    world, hand, _ = world_of()
    ours, tenant = world.namespace, world.namespace.with_salt("tenant")
    serve(world, hand, owner=ours)
    serve(world, hand, owner=tenant)
    world.cache.flush(tenant)
    hand.settle(world.cache.poll)
    assert serve(world, hand, owner=ours)["device"] == 6 * PAGE
    assert serve(world, hand, owner=tenant) == NOTHING


@pytest.mark.parametrize("used_before", [True, False])
def test_a_flush_of_everything_is_of_every_tenant_and_of_no_other_model(used_before):
    """Also of a tenant that only an earlier process has served: its pages are cleared when it comes."""
    shelf = Shelf()
    other = namespace(MODELS["one"]).with_adapter("another")
    for owner in (namespace(MODELS["one"]).with_salt("tenant"), other):
        first, hand, _ = world_of(backend=shelf)
        serve(first, hand, owner=owner)
        first.cache.close()
    world, hand, _ = world_of(backend=shelf)
    ours, tenant = world.namespace, world.namespace.with_salt("tenant")
    serve(world, hand)
    if used_before:
        serve(world, hand, owner=tenant)
    flushed(world, hand)
    if not used_before:
        forget(world, Tier.DEVICE, Tier.HOST)
    assert serve(world, hand, owner=tenant) == NOTHING
    assert serve(world, hand, owner=ours) == NOTHING
    if used_before:
        return
    world.cache.close()
    last, hand, _ = world_of(backend=shelf)
    assert serve(last, hand, owner=other)["storage"] == 6 * PAGE


def test_a_running_request_is_in_the_way_unless_forced():
    world, hand, shelf = world_of()
    match = world.prefill(PROMPT)
    with pytest.raises(InUseError, match="1 requests run on what is to be flushed"):
        world.cache.flush()
    with pytest.raises(InUseError):
        world.cache.flush(world.namespace)
    assert world.cache.flush(world.namespace.with_salt("tenant")) is not None
    hand.settle(world.cache.poll)
    assert world.cached(PROMPT) == (6 * PAGE, 6 * PAGE)
    world.born[match] = 0
    flushed(world, hand, force=True)
    assert world.cached(PROMPT) == (0, 0)
    world.check(match)
    assert world.decode(match, LONGER)
    hand.settle(world.cache.poll)
    world.check(match)
    assert world.cached(LONGER) == (0, 0)
    assert shelf.used_bytes == 0, "what it adds is not stored either"
    assert serve(world, hand, LONGER) == NOTHING
    assert serve(world, hand, LONGER)["device"] == 9 * PAGE
    world.check(match)
    world.cache.flush(force=False)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()
    assert not world.cache.controller.flushes.any_retired


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_retracted_request_comes_back_after_a_forced_flush(model):
    world, hand, _ = world_of(model)
    match = world.prefill(PROMPT)
    world.born[match] = 0
    retracted = world.cache.retraction_backup(match)
    assert retracted is not None
    flushed(world, hand, force=True)
    load = world.cache.retraction_restore(retracted)
    assert load is not None
    hand.settle(world.cache.poll)
    assert load.result() == load.tokens
    world.check(match)
    assert world.cached(PROMPT) == (0, 0)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()


@pytest.mark.parametrize("done", [(), (Query,), (Query, Fetch)])
def test_what_is_on_its_way_from_storage_brings_nothing_back(done):
    world, hand, _ = world_of()
    serve(world, hand)
    forget(world, Tier.DEVICE, Tier.HOST)
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    for kind in done:
        hand.run(kind, count=2 if kind is Fetch else None)
        if kind is Query:
            world.cache.poll()
    world.cache.flush()
    world.generation += 1
    assert ticket.done
    hand.run(Query, Fetch)
    world.cache.poll()
    assert world.cached(PROMPT) == (0, 0)
    late = world.cache.prefetch(PROMPT, world.namespace)
    assert late.done, "storage has not cleared it yet"
    hand.settle(world.cache.poll)
    assert serve(world, hand) == NOTHING
    world.idle()


def test_a_load_that_is_under_way_is_for_its_request_alone():
    world, hand, _ = world_of()
    serve(world, hand)
    forget(world, Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    world.born[match] = 0
    flush = world.cache.flush(force=True)
    world.generation += 1
    assert len(hand.of(Load)) == 1
    hand.settle(world.cache.poll)
    assert flush.done
    assert load.result() == 6 * PAGE
    world.check(match)
    assert world.cached(PROMPT) == (0, 0)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()


@pytest.mark.parametrize("waiting", [Backup, Store])
def test_what_is_on_its_way_to_storage_does_not_stay_there(waiting):
    world, hand, shelf = world_of()
    world.serve(PROMPT)
    if waiting is Store:
        hand.run(Backup)
        world.cache.poll()
    assert hand.of(waiting)
    world.cache.flush()
    world.generation += 1
    hand.settle(world.cache.poll)
    world.idle()
    assert shelf.used_bytes == 0
    assert serve(world, hand) == NOTHING


def test_storage_that_can_not_be_cleared_is_said_and_not_used_until_it_can():
    broken = True

    class Stuck(Shelf):
        def clear(self, namespace: bytes) -> Cleared:
            return Cleared(left_pages=6) if broken else super().clear(namespace)

    shelf = Stuck()
    world, hand, _ = world_of(backend=shelf)
    serve(world, hand)
    result = flushed(world, hand)
    assert result.storage == Cleared(0, 0, 6)
    assert serve(world, hand) == NOTHING
    forget(world, Tier.DEVICE, Tier.HOST)
    assert serve(world, hand) == NOTHING
    broken = False
    forget(world, Tier.DEVICE, Tier.HOST)
    assert serve(world, hand) == NOTHING, "it is cleared now"
    forget(world, Tier.DEVICE, Tier.HOST)
    assert serve(world, hand)["storage"] == 6 * PAGE


def test_a_store_that_fails_is_named_in_the_reply():
    class Dead(Shelf):
        def clear(self, namespace: bytes) -> Cleared:
            raise OSError("gone")

    world, hand, _ = world_of(backend=Dead())
    serve(world, hand)
    assert flushed(world, hand).problems == ("storage was not cleared: OSError: gone",)


def test_a_store_that_is_attached_after_a_flush_is_used_as_it_is():
    world, hand, shelf = world_of()
    serve(world, hand)
    world.cache.detach_storage_backend()
    result = flushed(world, hand)
    assert result.storage == Cleared()
    world.generation = 0
    world.cache.attach_storage_backend(PageStore(shelf))
    assert serve(world, hand)["storage"] == 6 * PAGE


def test_a_result_that_is_not_there_yet_is_not_to_be_had():
    world, hand, _ = world_of()
    serve(world, hand)
    flush = world.cache.flush()
    assert len(hand.of(Clear)) == 1
    assert not flush.done
    with pytest.raises(InvariantError, match="poll until it is done"):
        flush.result()


def test_threads_clear_after_what_they_store():
    """With real threads: a store that was begun before the flush does not outlast it."""
    held = HeldBackend(Shelf())
    world = World(executor=ThreadExecutor(), backend=held, timeout_s=10.0)
    held.hold(Operation.WRITE)
    world.serve(PROMPT)
    while not held.wait_until_held(Operation.WRITE, 0.01):
        world.cache.poll()
    flush: Flush = world.cache.flush()
    held.release(Operation.WRITE)
    while not flush.done:
        world.cache.poll()
    assert flush.result().storage.pages > 0
    assert held.inner.used_bytes == 0
    world.cache.close()


def test_pages_that_faults_hide_are_cleared_all_the_same():
    """`contains` that says no does not keep a page from going."""

    def hide(operation: Operation, key: StorageKey) -> Fault | None:
        return Fault.MISS if operation is Operation.CONTAINS else None

    shelf, hand = Shelf(), HandExecutor()
    world = World(executor=hand, backend=FaultyBackend(shelf, hide))
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert shelf.used_bytes > 0
    flushed(world, hand)
    assert shelf.used_bytes == 0
