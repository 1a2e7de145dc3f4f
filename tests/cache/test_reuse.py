"""The hit of every prefix is what `longest_usable` says of the pages whose bytes are in memory; its bytes are right."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.controller.state import present
from hicache.coverage import Checkpoint, longest_usable
from hicache.units import DeviceSlots, Tier
from tests.world import KINDS, PAGE, World, page_content, tokens

MOST_PAGES = 8


def text_of(forks: list[int], length: int) -> bytes:
    """A text that differs from others' by `forks[page]` at the start of each page."""
    return tokens(*[forks[page] if place == 0 else 7 for page in range(MOST_PAGES) for place in range(PAGE)][:length])


class Reader:
    """Knows by its bytes which page a slot holds: nothing here looks at the tree's paths."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.prefixes: dict[str, dict[bytes, bytes]] = {pool.name: {} for pool in world.model.pools}

    def learn(self, text: bytes) -> None:
        """A text that may be cached."""
        for stop in range(PAGE * 4, len(text) + 1, PAGE * 4):
            for pool in self.world.model.pools:
                content = page_content(self.world.namespace, pool.name, text[:stop], pool.geometry.slot_bytes)
                self.prefixes[pool.name][content.tobytes()] = text[:stop]

    def held(self, pool: str, tier: Tier) -> set[bytes]:
        """The prefixes whose last page a pool holds in a tier."""
        state = self.world.cache.controller.state
        entry = state.group.get_entry(pool)
        slots = present(state.tree.resident(entry.derived_from or pool, tier))
        size = entry.device_pool.geometry.slot_bytes
        if tier is Tier.DEVICE:
            pages = entry.device_pool.stage(DeviceSlots(slots))
        else:
            pages = state.group.get_pool(pool).pages[slots, :size]
        return {self.prefixes[pool][page.tobytes()] for page in pages}

    def expected(self, text: bytes) -> tuple[int, int]:
        """Tokens of a text that can be resumed on the device, and with loads."""
        pages = max(0, len(text) // 4 - 1) // PAGE
        prefixes = [text[: 4 * PAGE * (page + 1)] for page in range(pages)]
        lengths = []
        for tiers in ((Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)):
            pools = []
            for pool in self.world.model.pools:
                held = set().union(*(self.held(pool.name, tier) for tier in tiers))
                source = next(one for one in self.world.model.pools if one.name == (pool.derived_from or pool.name))
                pools.append((source.coverage, np.array([prefix in held for prefix in prefixes], np.bool_)))
            lengths.append(longest_usable(pools, PAGE) * PAGE)
        return lengths[0], lengths[1]


class History:
    """What a server does to its cache."""

    def __init__(self, model: str) -> None:
        self.world = World(KINDS[model], device_pages=24, host_pages=24, write_policy="write_back")
        self.reader = Reader(self.world)
        self.texts: list[bytes] = []

    def serve(self, text: bytes, steps: list[int], snapshots: list[bool]) -> None:
        """Compute a text in steps of so many tokens, with a snapshot after some of them."""
        self.reader.learn(text)
        self.texts.append(text)
        match = self.world.cache.match_prefix(text, self.world.namespace)
        self.world.finish_load(match)
        self.world.check(match)
        for stop, snapshot in zip([*np.cumsum(steps).tolist(), len(text) // 4], [*snapshots, True], strict=False):
            piece = text[: 4 * max(stop, match.length_tokens)]
            if not self.world.decode(match, piece, checkpoint=snapshot):
                break
        self.world.cache.release(match)

    def evict(self, pool: str, tier: Tier, pages: int) -> None:
        self.world.cache.evict(tier, pages, pool)
        self.world.settle()

    def prefixes(self) -> Iterator[bytes]:
        for text in self.texts:
            for length in range(len(text) // 4 + 1):
                yield text[: 4 * length]

    def check(self) -> None:
        for text in self.prefixes():
            assert self.world.cached(text) == self.reader.expected(text), len(text) // 4
        self.world.cache.audit()

    def reuse(self) -> None:
        """Whatever is said to be there can be loaded, and holds the right bytes."""
        for text in self.texts:
            expected = self.reader.expected(text)[1]
            match = self.world.cache.match_prefix(text, self.world.namespace)
            load = self.world.finish_load(match)
            assert load is not None
            assert load.tokens == expected
            self.world.check(match)
            self.world.cache.release(match)
        self.world.settle()
        self.world.idle()


texts = st.builds(text_of, st.lists(st.integers(0, 1), min_size=8, max_size=8), st.integers(1, MOST_PAGES * PAGE))


@pytest.mark.parametrize("model", sorted(KINDS))
@settings(max_examples=max(6, settings.default.max_examples // 10))
@given(data=st.data())
def test_reuse_equals_the_plain_model_at_every_length(model, data):
    history = History(model)
    pools = [pool.name for pool in history.world.model.pools if pool.derived_from is None]
    for _ in range(data.draw(st.integers(1, 4), "rounds")):
        for text in data.draw(st.lists(texts, min_size=1, max_size=2), "texts"):
            steps = data.draw(st.lists(st.integers(1, 2 * PAGE), max_size=4), "steps")
            history.serve(text, steps, data.draw(st.lists(st.booleans(), min_size=4, max_size=4), "snapshots"))
        history.check()
        for _ in range(data.draw(st.integers(0, 2), "evictions")):
            tier = data.draw(st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST]))
            history.evict(data.draw(st.sampled_from(pools)), tier, data.draw(st.integers(1, 6)))
            history.check()
    history.reuse()


@pytest.mark.parametrize("model", sorted(KINDS))
def test_nothing_evicted_means_every_shared_page_is_a_hit_up_to_the_last_snapshot(model):
    """The same by hand: what was served says alone which prefixes must be hits."""
    dice = random.Random(model)
    world = World(KINDS[model], device_pages=60, host_pages=60)
    pages: set[bytes] = set()
    snapshots: set[bytes] = set()
    for _ in range(12):
        text = text_of([int(dice.random() < 0.25) for _ in range(MOST_PAGES)], dice.randint(1, MOST_PAGES * PAGE))
        for length in range(len(text) // 4 + 1):
            prefixes = [text[: 4 * PAGE * (page + 1)] for page in range(max(0, length - 1) // PAGE)]
            pools = []
            for pool in world.model.pools:
                known = snapshots if isinstance(pool.coverage, Checkpoint) else pages
                pools.append((pool.coverage, np.array([prefix in known for prefix in prefixes], np.bool_)))
            expected = longest_usable(pools, PAGE) * PAGE
            assert world.cached(text[: 4 * length]) == (expected, expected)
        match = world.prefill(text)
        world.check(match)
        world.cache.release(match)
        pages.update(text[: 4 * PAGE * (page + 1)] for page in range(len(text) // 4 // PAGE))
        if len(text) // 4 >= PAGE:
            snapshots.add(text[: len(text) // 4 // PAGE * PAGE * 4])
    world.settle()
    world.idle()
