"""Pages are copied to the host when the write policy says so, and stay as long as the eviction policy says."""

import random
from typing import Any

import pytest
from hypothesis import settings

from hicache.errors import ConfigError
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.transfer import Backup
from hicache.tree import POLICIES, runs
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import KINDS, MODELS, PAGE, World, tokens

PROMPT = tokens(*range(4 * PAGE + 1))
LONGER = tokens(*range(6 * PAGE + 1))
OTHER = tokens(*range(1000, 1000 + 4 * PAGE + 1))


class Pending:
    """Computation that passes when it is told to."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def wait(self) -> None:
        assert self.passed


def selective(hits: int, **changes: Any) -> World:
    hand = HandExecutor()
    chosen = {"write_through_hits": hits}
    return World(executor=hand, write_policy="write_through_selective", settings=chosen, **changes)


def dropped(world: World) -> int:
    return world.cache.stats().counters["dropped_pages"]


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("hits", [1, 2, 3])
def test_pages_are_written_through_at_the_hit_that_the_setting_names(model, hits):
    world = selective(hits, model=MODELS[model])
    for _ in range(hits):
        world.serve(PROMPT)
        assert not world.executor.of(Backup)
    world.serve(PROMPT)
    assert len(world.executor.of(Backup)) == 1
    world.serve(PROMPT)
    assert len(world.executor.of(Backup)) == 1, "they are on their way"
    world.executor.settle(world.cache.poll)
    world.serve(PROMPT)
    assert not world.executor.waiting
    world.idle()


def test_only_the_part_of_a_prompt_that_was_used_often_is_written():
    world = selective(2)
    world.serve(PROMPT)
    world.serve(LONGER)
    world.serve(LONGER)
    assert [len(backup.plan.copies[0].host_slots) for backup in world.executor.of(Backup)] == [4]
    world.executor.settle(world.cache.poll)
    assert world.cache.evict(Tier.DEVICE) == 6, "clean or not, they go at once"
    assert dropped(world) == 2
    assert world.cached(LONGER) == (0, 4 * PAGE)
    world.idle()


def test_a_copy_of_what_is_still_computed_waits_for_it():
    world = selective(1)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert world.allocate(match, 4 * PAGE + 1)
    world.compute(match, PROMPT)
    event = Pending()
    world.cache.insert(match, PROMPT, event)
    world.serve(PROMPT)
    (backup,) = world.executor.of(Backup)
    assert not backup.after.query()
    event.passed = True
    assert backup.after.query()
    world.cache.release(match)
    world.executor.settle(world.cache.poll)
    world.serve(OTHER)
    world.serve(OTHER)
    assert world.executor.of(Backup)[0].after is None
    world.executor.settle(world.cache.poll)
    world.idle()


def limits(world: World) -> dict[str, int]:
    """The most dirty pages per pool, as the settings say."""
    group, share = world.cache.controller.mem_pool_host, world.settings["write_back_watermark"]
    entries = [group.get_entry(pool) for pool in world.cache.controller.state.pools]
    return {
        entry.name: max(int(share * entry.device_pool.slots), entry.device_pool.slots - entry.host_pool.slots // 2)
        for entry in entries
    }


def dirty(world: World, pool: str) -> int:
    """Device pages of a pool without a host copy that nothing pins, counted one by one."""
    tree = world.cache.controller.state.tree
    core = tree._core
    number = core.pool(pool)
    found = 0
    for node in core.walk():
        device, host = (runs.mask(held[number], core.size(node)) for held in (node.device, node.host))
        found += 0 if node.here or node.pins is not None else int((device & ~host).sum())
    return found


def test_dirty_pages_above_the_watermark_are_copied_in_the_background_oldest_first():
    hand = HandExecutor()
    world = World(executor=hand, write_policy="write_back", settings={"write_back_watermark": 0.25})
    world.serve(PROMPT)
    world.cache.poll()
    assert not hand.waiting, "a quarter of 16"
    world.serve(OTHER)
    world.cache.poll()
    world.cache.poll()
    assert [len(backup.plan.copies[0].host_slots) for backup in hand.of(Backup)] == [4], "once"
    hand.settle(world.cache.poll)
    assert world.cache.evict(Tier.DEVICE, 4) == 4, "and is clean when room is wanted"
    assert world.cached(PROMPT) == (0, 4 * PAGE)
    assert world.cached(OTHER) == (4 * PAGE, 4 * PAGE)
    world.idle()


def test_copies_ahead_of_need_take_no_more_than_half_of_a_small_host():
    world = World(host_pages=8, write_policy="write_back", settings={"write_back_watermark": 0.0})
    world.serve(LONGER)
    world.serve(tokens(*range(1000, 1000 + 8 * PAGE + 1)))
    world.settle()
    assert dirty(world, "kv") == 14 - 2
    assert world.cache.stats().counters["backup_pages"] == 2
    world.idle()


def test_copies_ahead_of_need_do_not_take_each_others_place():
    world = World(host_pages=16, write_policy="write_back", settings={"write_back_watermark": 0.5})
    for number in range(30):
        world.serve(tokens(*range(1000 * number, 1000 * number + 4 * PAGE + 1)))
        world.settle()
    copied = world.cache.stats().counters["backup_pages"]
    assert copied <= 4 * 30
    world.settle()
    assert world.cache.stats().counters["backup_pages"] == copied
    assert world.cache.stats().counters["dropped_pages"] == 0
    world.idle()


def walk(seed: int, write_policy: str) -> None:
    """Prompts come and go in a cache that is too small for them."""
    dice = random.Random(seed)
    kind, policy = dice.choice(sorted(KINDS)), dice.choice(list(POLICIES))
    device_pages = dice.randint(8, 20)
    chosen = {"eviction_policy": policy, "write_back_watermark": dice.choice([0.0, 0.3, 0.7, 1.0])}
    rates = FaultRates(start=dice.choice([1.0, 0.5]))
    world = World(
        KINDS[kind],
        device_pages,
        dice.choice([2, 4]) * device_pages,
        SimulatedExecutor(seed, rates),
        write_policy=write_policy,
        settings=chosen,
    )
    most = limits(world)
    held = []
    for _ in range(30):
        fork = dice.choice([0, 0, 1, 2, 3]) * 1000
        prompt = tokens(*range(fork, fork + dice.randint(1, 6) * PAGE + 1))
        match = world.cache.match_prefix(
            prompt, world.namespace, priority=dice.choice([0, 0, 1]), ttl_s=dice.choice([None, 2.0])
        )
        world.finish_load(match)
        if world.allocate(match, len(prompt) // 4 - match.length_tokens):
            world.compute(match, prompt)
            world.cache.insert(match, prompt)
        world.check(match)
        held.append(match)
        while len(held) > dice.choice([0, 1, 1]):
            world.cache.release(held.pop(0))
        world.clock.now_s += dice.choice([0.0, 1.0])
        world.cache.poll()
        world.cache.audit()
        world.cache.controller.state.tree.check()
        if write_policy == "write_back":
            for pool in most:
                assert dirty(world, pool) <= most[pool], (pool, kind)
    for match in held:
        world.cache.release(match)
    world.settle()
    world.idle()


@pytest.mark.parametrize("write_policy", ["write_back", "write_through_selective", "write_through"])
def test_seeded_walks_keep_to_the_watermark_and_to_their_bytes(write_policy):
    for seed in range(settings.default.max_examples // 5):
        try:
            walk(seed, write_policy)
        except Exception as error:
            error.add_note(f"walk({seed}, {write_policy!r})")
            raise


def use(world: World, prompt: bytes, **wish: Any) -> None:
    match = world.cache.match_prefix(prompt, world.namespace, **wish)
    if world.allocate(match, len(prompt) // 4 - match.length_tokens):
        world.compute(match, prompt)
        world.cache.insert(match, prompt)
    world.cache.release(match)


def test_a_requests_priority_is_for_what_it_inserts_and_uses_until_its_time_has_passed():
    world = World(device_pages=16, settings={"eviction_policy": "priority"})
    world.clock.now_s = 5000.0
    use(world, PROMPT, priority=1, ttl_s=10.0)
    use(world, OTHER)
    world.settle()
    assert world.cache.evict(Tier.DEVICE, 4) == 4
    assert world.cached(PROMPT)[0] == 4 * PAGE
    assert world.cached(OTHER)[0] == 0
    use(world, tokens(*range(2000, 2000 + 4 * PAGE + 1)))
    world.clock.now_s += 10.0
    world.settle()
    assert world.cache.evict(Tier.DEVICE, 4) == 4
    assert world.cached(PROMPT)[0] == 0
    world.idle()


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan")])
def test_a_time_to_live_is_above_zero(ttl_s):
    world = World()
    with pytest.raises(ConfigError, match="seconds, above 0"):
        world.cache.match_prefix(PROMPT, world.namespace, ttl_s=ttl_s)
    world.idle()


def test_a_policy_of_ones_own():
    class Longest:
        """The deepest node goes first."""

        name = "deepest"
        keys_fall = False

        def key(self, node):
            return -node.start

    world = World(policy=Longest())
    use(world, PROMPT)
    use(world, LONGER)
    use(world, OTHER)
    world.settle()
    assert world.cache.evict(Tier.DEVICE, 2) == 2
    assert world.cached(LONGER)[0] == 4 * PAGE
    world.idle()
