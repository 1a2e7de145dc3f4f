"""Of a windowed pool only the window's tail is loaded and pinned; what lies behind it goes, each slot once."""

import random

import numpy as np
import pytest

from hicache.cache import Match
from hicache.storage.memory import MemoryBackend
from hicache.testing.streams import VirtualEvent
from hicache.transfer import Load
from hicache.units import HOLE, Tier
from tests.hand import HandExecutor
from tests.world import CHUNKED, KINDS, PAGE, World, tokens

PROMPT = tokens(*range(9 * PAGE + 1))
WINDOW_PAGES = {"three": 2, "chunked": 3, "window": 2, "window and state": 2, "state and window": 1, "everything": 2}
"""How many pages of pool `swa` resuming needs."""


class Shelf(MemoryBackend):
    """Outlives its caches."""

    def close(self) -> None:
        """Keeps everything."""


def evictable(world: World, tier: Tier = Tier.DEVICE, pool: str = "swa") -> int:
    return world.cache.controller.state.tree.evictable(pool, tier)


def everything_can_be_had(world: World) -> None:
    world.settle()
    world.idle()
    for pool in world.cache.stats().pools:
        assert world.cache.controller.state.room(pool.pool, pool.tier) == pool.slots, pool


@pytest.mark.parametrize("model", sorted(WINDOW_PAGES))
def test_only_the_tail_is_loaded_and_pinned_in_either_tier(model):
    hand = HandExecutor()
    world = World(KINDS[model], executor=hand)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    tail = WINDOW_PAGES[model]
    match = world.cache.match_prefix(PROMPT, world.namespace)
    load = world.cache.load_back(match)
    (message,) = hand.of(Load)
    copied = {part.copy.pool: part.copy for layer in message.plan.layers for part in layer}
    assert len(copied["swa"].host_slots) == tail
    assert evictable(world, Tier.HOST) == 9 - tail, "behind the window, host copies may go while the tail is read"
    assert np.flatnonzero(match.slots("swa") != HOLE).tolist() == list(range(9 - tail, 9))
    hand.run(Load)
    assert load.result() == 9 * PAGE
    world.check(match)
    assert evictable(world) == 0
    assert evictable(world, Tier.HOST) == 9
    world.cache.release(match)
    assert evictable(world) == tail
    hand.settle(world.cache.poll)
    world.idle()


@pytest.mark.parametrize("model", sorted(WINDOW_PAGES))
def test_a_hit_on_the_device_pins_its_tail(model):
    world = World(KINDS[model])
    world.serve(PROMPT)
    world.settle()
    for pages in (9, 3):
        match = world.cache.match_prefix(PROMPT[: (pages * PAGE + 1) * 4], world.namespace)
        if match.device_tokens:
            assert evictable(world) == 9 - min(pages, WINDOW_PAGES[model])
        world.cache.release(match)
    assert evictable(world) == 9
    world.idle()


@pytest.mark.parametrize("model", sorted(WINDOW_PAGES))
@pytest.mark.parametrize("late", [False, True])
def test_pages_behind_the_window_are_free_to_go_while_the_request_runs(model, late):
    world = World(KINDS[model], write_policy="write_back")
    match = world.cache.match_prefix(PROMPT, world.namespace)
    events = []
    for pages in range(1, 10):
        text = PROMPT[: pages * PAGE * 4]
        assert world.allocate(match, PAGE)
        world.compute(match, text)
        event = VirtualEvent() if late else None
        world.cache.insert(match, text, event)
        events.append(event)
        behind = max(0, pages - WINDOW_PAGES[model])
        if event is not None:
            world.cache.poll()
            assert evictable(world) == max(0, behind - 1), "the step before last has passed, the last one has not"
            event.passed = True
            world.cache.poll()
        assert evictable(world) == behind
        world.check(match)
        world.cache.audit()
    assert world.cache.evict(Tier.DEVICE, pool="swa") == 0
    world.settle()
    gone = world.cache.evict(Tier.DEVICE, pool="swa")
    assert gone == 9 - WINDOW_PAGES[model]
    world.check(match)
    assert match.slots("swa").tolist().count(HOLE) == gone
    world.cache.release(match)
    everything_can_be_had(world)


@pytest.mark.parametrize("model", ["three", "chunked", "everything"])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("chunk", [1, PAGE, 2 * PAGE])
def test_a_request_that_is_much_longer_than_its_windowed_pool(model, policy, chunk):
    pages = 40
    world = World(KINDS[model], device_pages=pages, host_pages=pages, write_policy=policy, window_ratio=0.01)
    slots = {pool.pool: pool.slots for pool in world.cache.stats().pools if pool.tier is Tier.DEVICE}
    assert slots["swa"] == WINDOW_PAGES[model] + 2
    assert slots["kv"] > pages
    text = tokens(*range(pages * PAGE))
    match = world.cache.match_prefix(text, world.namespace)
    for stop in range(chunk, len(text) // 4 + 1, chunk):
        assert world.decode(match, text[: 4 * stop]), f"no room at {stop} tokens"
        world.check(match)
    assert match.page_count == pages
    world.cache.audit()
    assert world.cache.stats().counters["dropped_pages"] == 0 or policy == "write_back"
    if policy == "write_through":
        again = world.cache.match_prefix(text + tokens(1), world.namespace)
        assert again.known_tokens == pages * PAGE
        world.cache.release(again)
    world.cache.release(match)
    everything_can_be_had(world)


def test_a_prompt_that_ends_inside_a_window_that_has_moved_on_is_no_hit():
    world = World(CHUNKED, device_pages=40, host_pages=40, window_ratio=0.01)
    text = tokens(*range(30 * PAGE + 1))
    match = world.cache.match_prefix(text, world.namespace)
    for page in range(1, 31):
        assert world.decode(match, text[: page * PAGE * 4])
    world.cache.release(match)
    world.settle()
    assert world.cached(text) == (30 * PAGE, 30 * PAGE)
    assert world.cached(text[: 4 * 20 * PAGE]) == (0, 0)
    again = world.prefill(text[: 4 * (2 * PAGE + 1)])
    assert again.cached_tokens["device"] == 0
    world.check(again)
    world.cache.release(again)
    everything_can_be_had(world)


class Crowd:
    """Requests that share pages grow, lose what is behind their window, and go: alone, or many in one step."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.dice = random.Random(seed)
        self.texts: dict[Match, bytes] = {}
        self.event = VirtualEvent()

    def some(self, most: int) -> list[Match]:
        return self.dice.sample(list(self.texts), min(most, len(self.texts)))

    def arrive(self) -> None:
        text = tokens(*[self.dice.randint(0, 1) if place % (3 * PAGE) == 0 else 7 for place in range(12 * PAGE)])
        match = self.world.cache.match_prefix(text, self.world.namespace)
        self.world.finish_load(match)
        self.texts[match] = text

    def grow(self, match: Match) -> None:
        text = self.texts[match][: 4 * (match.length_tokens + self.dice.choice([1, PAGE, 2 * PAGE + 1]))]
        checkpoint = self.dice.random() < 0.3
        if self.world.cache.allocate(match, len(text) // 4 - match.length_tokens, checkpoint=checkpoint) is not None:
            self.world.compute(match, text)
            shared = self.dice.random() < 0.7
            self.world.cache.insert(match, text, self.dice.choice([None, self.event]), checkpoints=shared)

    def leave(self, match: Match) -> None:
        self.world.cache.release(match, self.dice.choice([None, self.event]))
        del self.texts[match]

    def pass_event(self) -> None:
        self.event.passed = True
        self.world.cache.poll()
        self.event = VirtualEvent()

    def step(self) -> None:
        if len(self.texts) < 5 and self.dice.random() < 0.5:
            self.arrive()
        for match in self.some(2):
            self.grow(match)
        if self.dice.random() < 0.25:
            self.world.cache.evict(Tier.DEVICE, self.dice.choice([1, 3]), pool="swa")
        if self.dice.random() < 0.2:
            for match in self.some(self.dice.randint(1, 5)):
                self.leave(match)
        if self.dice.random() < 0.3:
            self.pass_event()
        self.world.cache.audit()
        for match in self.texts:
            self.world.check(match)


@pytest.mark.parametrize("model", sorted(WINDOW_PAGES))
@pytest.mark.parametrize("seed", range(4))
def test_each_slot_comes_back_once_whatever_the_order(model, seed):
    world = World(KINDS[model], device_pages=30, host_pages=30, window_ratio=0.4)
    crowd = Crowd(world, seed)
    for _ in range(60):
        crowd.step()
    for match in crowd.some(5):
        crowd.leave(match)
    crowd.pass_event()
    everything_can_be_had(world)


def test_the_windows_are_what_these_tests_say():
    for model, pages in WINDOW_PAGES.items():
        pool = next(pool for pool in KINDS[model].pools if pool.name == "swa")
        assert len(pool.coverage.required(20, PAGE)) == pages


@pytest.mark.parametrize("model", ["three", "chunked", "everything"])
def test_a_prefetch_may_take_the_place_of_what_is_behind_its_window(model):
    backend = Shelf()
    text = tokens(*range(12 * PAGE + 1))
    first = World(KINDS[model], device_pages=20, host_pages=20, backend=backend)
    first.serve(text)
    first.settle()
    first.cache.close()
    world = World(KINDS[model], device_pages=20, host_pages=20, window_ratio=0.01, backend=backend)
    match = world.cache.match_prefix(text, world.namespace)
    for page in range(1, 7):
        assert world.decode(match, text[: page * PAGE * 4])
    world.cache.release(match)
    world.settle()
    world.cache.evict(Tier.DEVICE)
    free = world.cache.controller.state.available("swa", Tier.HOST)
    assert free < WINDOW_PAGES[model] < free + evictable(world, Tier.HOST)
    ticket = world.cache.prefetch(text, world.namespace)
    world.settle()
    assert ticket.done
    assert world.cached(text) == (0, 12 * PAGE)
    match = world.cache.match_prefix(text, world.namespace, ticket)
    world.finish_load(match)
    world.check(match)
    assert match.cached_tokens["storage"] >= 6 * PAGE
    world.cache.release(match)
    everything_can_be_had(world)
