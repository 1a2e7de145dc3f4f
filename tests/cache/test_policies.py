"""Pages reach host and storage as the policy says; what can't be done is counted, and nothing is lost on the way."""

import pytest

from hicache.errors import StorageError
from hicache.storage import PageStore
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import Fault, FaultyBackend, Operation
from hicache.transfer import Backup, Message, Store
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import MODELS, PAGE, World, tokens

PROMPT = tokens(*range(4 * PAGE + 1))
OTHER = tokens(*range(1000, 1000 + 4 * PAGE + 1))


def pages(world: World, tier: Tier) -> int:
    return next(pool.cached for pool in world.cache.stats().pools if pool.pool == "kv" and pool.tier is tier)


def counters(world: World) -> dict[str, int]:
    return dict(world.cache.stats().counters)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_write_through_copies_pages_once_when_they_are_computed(model):
    hand = HandExecutor()
    world = World(MODELS[model], executor=hand, backend=MemoryBackend())
    world.serve(PROMPT)
    assert len(hand.of(Backup)) == 1
    world.serve(PROMPT)
    assert len(hand.of(Backup)) == 1, "they are on their way"
    hand.run(Backup)
    world.cache.poll()
    assert pages(world, Tier.HOST) == 4
    stores = len(hand.of(Store))
    assert stores > 0
    world.serve(PROMPT)
    assert len(hand.of(Store)) == stores, "they are on their way"
    hand.settle(world.cache.poll)
    written = {"one": 4, "derived": 2 * 4, "three": 4 + 4 + 1}[model]
    assert world.cache.stats().storage.written_pages == written
    world.serve(PROMPT)
    assert not hand.waiting
    world.idle()


def test_pages_that_are_on_their_way_are_not_copied_again_with_what_extends_them():
    hand = HandExecutor()
    world = World(executor=hand, backend=MemoryBackend())
    world.serve(PROMPT)
    world.serve(tokens(*range(6 * PAGE + 1)))
    assert [len(backup.plan.copies[0].host_slots) for backup in hand.of(Backup)] == [4, 2]
    hand.settle(world.cache.poll)
    assert counters(world)["backup_pages"] == 6
    assert counters(world)["store_pages"] == world.cache.stats().storage.written_pages == 6
    world.idle()


@pytest.mark.parametrize("model", sorted(MODELS))
def test_write_back_copies_pages_when_they_are_evicted(model):
    hand = HandExecutor()
    world = World(MODELS[model], executor=hand, backend=MemoryBackend(), write_policy="write_back")
    world.serve(PROMPT)
    assert not hand.waiting
    assert world.cache.evict(Tier.DEVICE) == 0
    assert world.cache.controller.writing_back
    hand.settle(world.cache.poll)
    assert pages(world, Tier.HOST) == pages(world, Tier.DEVICE) == 4
    assert counters(world)["store_pages"] >= 4
    assert world.cache.evict(Tier.DEVICE) == 4
    assert world.cached(PROMPT) == (0, 4 * PAGE)
    world.idle()


def test_eviction_takes_what_it_is_asked_for():
    hand = HandExecutor()
    world = World(executor=hand)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert world.cache.evict(Tier.DEVICE, 0) == 0
    assert world.cache.evict(Tier.DEVICE, 1) == 1
    assert world.cached(PROMPT) == (3 * PAGE, 4 * PAGE)
    assert world.cache.evict(Tier.HOST, 1) == 1
    assert world.cache.evict(Tier.DEVICE) == 3
    assert world.cache.evict(Tier.HOST) == 3
    assert world.cached(PROMPT) == (0, 0)
    world.idle()


def test_what_a_match_holds_is_not_evicted():
    hand = HandExecutor()
    world = World(executor=hand)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.cache.evict(Tier.DEVICE) == 0
    world.cache.release(match)
    assert world.cache.evict(Tier.DEVICE) == 4
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.cache.evict(Tier.HOST) == 0, "the last copy of what a match can load stays"
    world.cache.release(match)
    world.idle()


def test_a_backup_that_fails_is_counted_and_leaves_no_mark():
    hand = HandExecutor()
    world = World(executor=hand, backend=MemoryBackend())
    world.serve(PROMPT)
    hand.run(Backup, bad={"kv": [1, 2]})
    world.cache.poll()
    assert counters(world)["backup_failed_pages"] == 2
    assert pages(world, Tier.HOST) == 2
    world.cache.audit()
    hand.settle(world.cache.poll)
    assert counters(world)["store_pages"] == 1, "behind the first page that is missing, none could be found again"
    world.serve(PROMPT[: 4 * PAGE * 4] + OTHER)
    hand.settle(world.cache.poll)
    assert counters(world)["store_pages"] == 8, "and it is tried again when the prefix is extended"
    world.idle()


def test_a_host_that_is_full_drops_pages_and_counts_them():
    hand = HandExecutor()
    world = World(executor=hand, device_pages=5, host_pages=4, write_policy="write_back")
    world.serve(PROMPT)
    world.cache.evict(Tier.DEVICE)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    holder = world.cache.match_prefix(PROMPT, world.namespace)
    other = world.cache.match_prefix(OTHER, world.namespace)
    assert world.allocate(other, 4 * PAGE + 1)
    world.compute(other, OTHER)
    world.cache.release(world.cache.insert(other, OTHER))
    third = world.cache.match_prefix(tokens(7), world.namespace)
    assert world.cache.allocate(third, 5 * PAGE) is not None, "no page can be written back, so they go"
    assert not hand.waiting
    assert counters(world)["dropped_pages"] == 4
    assert counters(world)["backup_refused_pages"] == 4
    assert world.cached(OTHER) == (0, 0)
    world.cache.release(holder)
    world.cache.release(third)
    assert world.cached(PROMPT) == (0, 4 * PAGE)
    world.idle()


def test_a_store_that_failed_is_tried_again_when_the_prompt_is_used_again():
    backend = FaultyBackend(MemoryBackend(), lambda operation, key: None)
    backend.choose = lambda operation, key: Fault.FAIL if operation is Operation.WRITE else None
    hand = HandExecutor()
    world = World(executor=hand, backend=backend)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert counters(world)["store_failed_pages"] == 4
    backend.choose = lambda operation, key: None
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert counters(world)["store_pages"] == 4, "though the prompt was a full hit"
    world.serve(PROMPT)
    assert not hand.waiting
    world.idle()


def test_a_store_attached_late_gets_what_is_used_from_then_on():
    hand = HandExecutor()
    world = World(executor=hand)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    world.cache.attach_storage_backend(PageStore(MemoryBackend()))
    with pytest.raises(StorageError, match="detach it first"):
        world.cache.attach_storage_backend(PageStore(MemoryBackend()))
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert counters(world)["store_pages"] == 4
    world.cache.detach_storage_backend()
    world.cache.detach_storage_backend()
    world.serve(OTHER)
    hand.settle(world.cache.poll)
    assert counters(world)["store_pages"] == 4
    world.idle()


def test_a_store_is_swapped_while_pages_are_on_their_way_to_it():
    hand = HandExecutor()
    world = World(executor=hand, backend=MemoryBackend())
    world.serve(PROMPT)
    hand.run(Backup)
    world.cache.poll()
    assert hand.of(Store)
    world.cache.detach_storage_backend()
    world.cache.attach_storage_backend(PageStore(MemoryBackend()))
    hand.settle(world.cache.poll)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert world.cache.stats().storage.written_pages == 4
    world.idle()


class Refusing(HandExecutor):
    """Can't take messages of one kind on."""

    refused: type[Message] | None = None

    def submit(self, message: Message) -> None:
        if self.refused is not None and isinstance(message, self.refused):
            raise RuntimeError("can't start new thread")
        super().submit(message)


@pytest.mark.parametrize("kind", ["Backup", "Load", "Store", "Fetch", "Query"])
def test_a_transfer_that_cannot_be_submitted_takes_nothing(kind):
    refusing = Refusing()
    world = World(executor=refusing, backend=MemoryBackend())
    world.serve(OTHER)
    refusing.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    if kind in ("Fetch", "Query"):
        world.cache.evict(Tier.HOST)
    refusing.refused = vars(__import__("hicache.transfer", fromlist=[kind]))[kind]

    def use() -> None:
        ticket = world.cache.prefetch(OTHER, world.namespace)
        refusing.settle(world.cache.poll)
        assert ticket.done
        world.serve(PROMPT)
        refusing.settle(world.cache.poll)
        world.serve(OTHER)

    with pytest.raises(RuntimeError, match="new thread"):
        use()
    for match in list(world.cache._matches.values()):
        world.cache.release(match)
    refusing.refused = None
    refusing.settle(world.cache.poll)
    world.cache.audit()
    assert world.free_and_evictable(Tier.DEVICE) == world.device_pages
    assert world.free_and_evictable(Tier.HOST) == world.host_pages
    assert world.cache.stats().pins == 0
