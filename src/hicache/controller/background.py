"""Write-back ahead of need: what is dirty above the watermark is copied while nobody waits, oldest first."""

from collections.abc import Mapping

import numpy as np

from hicache.controller.backup import Backups
from hicache.controller.state import State
from hicache.tree import Span
from hicache.units import BoolArray, PoolName, Tier

STEP_PAGES = 256
"""The most pages that one step begins to copy for the sake of one pool."""


class Background:
    """Keeps the share of each device pool that has no host copy at or below the watermark.

    Host copies of device pages get at most half of a host pool by this: where that is less than the watermark asks
    for, more stays dirty. They take free host slots, or those of last copies, but never each other's.
    """

    def __init__(self, state: State, backups: Backups, watermark: float) -> None:
        self._state = state
        self._backups = backups
        self._limits = {pool: self._limit(pool, watermark) for pool in state.pools}

    def _limit(self, pool: PoolName, watermark: float) -> int:
        entry = self._state.group.get_entry(pool)
        device, host = entry.device_pool.slots, entry.host_pool.slots
        return max(int(watermark * device), device - host // 2)

    def over(self, pool: PoolName) -> int:
        """How many dirty pages a pool has above its limit, those that are being copied left out."""
        return self._state.tree.dirty_count(pool) - self._backups.pages_running(pool) - self._limits[pool]

    def step(self) -> None:
        """Begin to copy what is over, as much as one step may."""
        for pool in self._state.pools:
            over = min(self.over(pool), STEP_PAGES)
            if over > 0:
                self._write(pool, over)

    def _write(self, pool: PoolName, pages: int) -> None:
        left = dict.fromkeys(self._state.pools, STEP_PAGES) | {pool: pages}
        for span in self._state.tree.dirty(pool, pages):
            if min(left.values()) <= 0:
                return
            if not self._state.tree.holds(span):
                continue
            part = self._first(Span(span.node, 0, span.stop), left)
            lacking = self._backups.lacking(part)
            if not self._make_room(lacking) or not self._backups.start(part):
                return
            for name, wanted in lacking.items():
                left[name] -= int(wanted.sum())

    def _first(self, span: Span, most: Mapping[PoolName, int]) -> Span:
        """The span, cut off where a pool would have more than `most` pages to copy: heads are copied first."""
        stop = span.stop
        for pool, wanted in self._backups.lacking(span).items():
            places = np.flatnonzero(wanted)
            if len(places) > most[pool]:
                stop = min(stop, span.start + int(places[most[pool]]))
        return Span(span.node, span.start, stop)

    def _make_room(self, lacking: Mapping[PoolName, BoolArray]) -> bool:
        state = self._state
        for pool, wanted in lacking.items():
            short = int(wanted.sum()) - state.available(pool, Tier.HOST)
            if short > 0:
                state.free_eviction(state.tree.evict(pool, Tier.HOST, short, drop_dirty=True, keep_duplicates=True))
        return all(state.available(pool, Tier.HOST) >= int(wanted.sum()) for pool, wanted in lacking.items())
