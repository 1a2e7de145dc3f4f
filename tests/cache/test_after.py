"""What computation still writes or reads is neither copied nor given away before it has passed (S05, S04)."""

import numpy as np
import pytest

from hicache.coverage import Full
from hicache.testing.streams import StreamExecutor, VirtualStream
from hicache.units import Tier
from tests.world import MODELS, PAGE, World, tokens

PROMPT = tokens(*range(6 * PAGE + 1))
OTHER = tokens(*range(1000, 1000 + 6 * PAGE + 1))


class LateWorld(World):
    """Computes on a stream that runs when it is told to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.computing = VirtualStream()

    def later(self, prompt: bytes, *, event_at: str) -> None:
        """Prefill a prompt, inserted and released before any of it is computed."""
        match = self.cache.match_prefix(prompt, self.namespace)
        assert self.allocate(match, len(prompt) // 4 - match.length_tokens)
        self._enqueue(match, prompt)
        event = self.computing.record_event()
        self.cache.insert(match, prompt, event if event_at == "insert" else None)
        self.cache.release(match, event if event_at == "release" else None)

    def _enqueue(self, match, prompt: bytes) -> None:
        runs = {name: match.slots(self._source(name)).copy() for name, _ in self._device_pools()}

        def work() -> None:
            for name, pool in self._device_pools():
                run = runs[name]
                self._write(name, pool, run[: len(prompt) // 4 // PAGE], prompt)

        self.computing.enqueue(work)

    def settle(self) -> None:
        for _ in range(20):
            for stream in (self.executor.backups, self.executor.loads, self.executor.storage):
                stream.run()
            self.cache.poll()


CASES = [(name, "insert") for name in sorted(MODELS)]
CASES += [(name, "release") for name in sorted(MODELS) if all(p.coverage == Full() for p in MODELS[name].pools)]
"""What is behind a window is nobody's once it was inserted: only `insert` can say until when it is written."""


@pytest.mark.parametrize(("model", "event_at"), CASES)
def test_pages_are_written_back_only_once_they_are_computed(model, event_at):
    world = LateWorld(MODELS[model], device_pages=16, executor=StreamExecutor(), write_policy="write_back")
    world.later(PROMPT, event_at=event_at)
    assert world.cache.evict(Tier.DEVICE) == 0
    world.settle()
    world.cache.audit()
    assert world.cache.stats().counters["backup_pages"] == 0
    world.computing.run()
    world.settle()
    world.cache.evict(Tier.DEVICE)
    world.settle()
    world.cache.evict(Tier.DEVICE)
    match = world.cache.match_prefix(PROMPT, world.namespace)
    assert match.host_tokens == 6 * PAGE
    load = world.cache.load_back(match)
    world.settle()
    assert load.result() == 6 * PAGE
    world.check(match)
    world.cache.release(match)
    world.settle()
    world.idle()


@pytest.mark.parametrize("model", sorted(MODELS))
def test_pages_that_are_still_read_are_not_given_to_others(model):
    world = LateWorld(MODELS[model], device_pages=8, executor=StreamExecutor())
    world.later(PROMPT, event_at="insert")
    world.computing.run()
    world.settle()
    reader = world.cache.match_prefix(PROMPT, world.namespace)
    reads = set(reader.slots().tolist())
    assert world.allocate(reader, 1)
    event = world.computing.record_event()
    world.cache.release(reader, event)
    other = world.cache.match_prefix(OTHER, world.namespace)
    assert world.cache.allocate(other, 6 * PAGE) is None, "the clean pages may go, but not yet"
    assert world.cache.allocate(other, PAGE)
    assert not reads & set(other.slots().tolist())
    world.cache.audit()
    assert world.cache.stats().pins > 0
    world.computing.run()
    world.cache.poll()
    assert world.cache.allocate(other, 6 * PAGE) is not None
    world.cache.release(other)
    world.settle()
    world.idle()


def test_pages_behind_the_window_stay_until_the_step_that_saw_them_has_passed():
    world = LateWorld(MODELS["three"], device_pages=16, executor=StreamExecutor(), write_policy="write_back")
    world.later(PROMPT[: (4 * PAGE + 1) * 4], event_at="insert")
    world.computing.run()
    world.settle()
    match = world.cache.match_prefix(PROMPT, world.namespace)
    seen = match.slots("swa")[2:4].copy()
    assert world.allocate(match, len(PROMPT) // 4 - match.length_tokens)
    world._enqueue(match, PROMPT)
    match = world.cache.insert(match, PROMPT, world.computing.record_event())
    state = world.cache.controller.state
    state.free_eviction(state.tree.evict("swa", Tier.DEVICE, 100, drop_dirty=True))
    kept = match.slots("swa")[2:4]
    np.testing.assert_array_equal(kept, seen)
    world.computing.run()
    world.settle()
    state.free_eviction(state.tree.evict("swa", Tier.DEVICE, 100, drop_dirty=True))
    assert set(match.slots("swa")[:4].tolist()) == {-1}
    world.cache.release(match)
    world.settle()
    world.idle()


def test_closing_waits_for_the_computation():
    world = LateWorld(executor=StreamExecutor())
    world.later(PROMPT, event_at="insert")
    world.computing.run()
    world.cache.close()
    assert not world.cache.controller.state.deferred
