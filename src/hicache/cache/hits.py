"""What a request did not have to compute, by tier: counted once, when its match is first used and when a load ended."""

from collections.abc import Mapping

import numpy as np

from hicache.controller import Prefetch
from hicache.controller.state import State
from hicache.coverage import Checkpoint, longest_usable
from hicache.keys import TOKEN_BYTES
from hicache.tree import TreeMatch
from hicache.units import HOLE, BoolArray, Tier


class Hits:
    """The hits of one match. `prefetch` tells what came from storage."""

    def __init__(self, state: State, page_size: int, prefetch: Prefetch | None) -> None:
        self._state = state
        self._page_size = page_size
        self._prefetch = prefetch
        self._cached = dict.fromkeys(Tier, 0)

    @property
    def tokens(self) -> Mapping[Tier, int]:
        """Tokens that needed no computing, by the tier that they came from."""
        return self._cached

    def used(self, prompt: bytes, found: TreeMatch) -> None:
        """The match of a prompt is used for the first time."""
        counters, tokens = self._state.counters, found.device_pages * self._page_size
        counters.lookups += 1
        counters.lookup_tokens += len(prompt) // TOKEN_BYTES
        self._cached[Tier.DEVICE] = tokens
        counters.hit_tokens[Tier.DEVICE] += tokens
        counters.kv_hit_without_state += self._pages_without_state(found) * self._page_size

    def loaded(self, device_pages: int, good_pages: int) -> None:
        """A load has ended: `good_pages` are there, `device_pages` of them were before."""
        size, counters = self._page_size, self._state.counters
        device = min(device_pages, good_pages)
        stored = 0
        if self._prefetch is not None:
            stored = int(self._from_storage(self._prefetch, good_pages)[device:].sum())
        before = self._cached
        self._cached = {
            Tier.DEVICE: device * size,
            Tier.HOST: (good_pages - device - stored) * size,
            Tier.STORAGE: stored * size,
        }
        for tier, tokens in self._cached.items():
            counters.hit_tokens[tier] += tokens - before[tier]

    def _from_storage(self, prefetch: Prefetch, pages: int) -> BoolArray:
        """Which pages came from storage. Those that no pool needs came with the first that one does."""
        came = prefetch.fetched(pages)
        coverages = [self._state.group.get_entry(pool).coverage for pool in self._state.pools]
        needed = min(coverage.required(pages, self._page_size).start for coverage in coverages)
        if needed < pages:
            came[:needed] = came[needed]
        return came

    def _pages_without_state(self, found: TreeMatch) -> int:
        """Pages behind the hit that all pools could resume at but for those of states, which have no snapshot there."""
        state = self._state
        coverages = {pool: state.group.get_entry(pool).coverage for pool in state.pools}
        if found.pages == found.usable_pages or not any(isinstance(one, Checkpoint) for one in coverages.values()):
            return 0
        there = []
        for pool, coverage in coverages.items():
            if isinstance(coverage, Checkpoint):
                continue
            present = np.zeros(found.pages, dtype=np.bool_)
            for tier in (Tier.DEVICE, Tier.HOST):
                present |= state.tree.slots(found, pool, tier, 0, found.pages) != HOLE
            there.append((coverage, present))
        return max(0, longest_usable(there, self._page_size) - found.usable_pages)
