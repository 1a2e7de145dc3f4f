"""Slots that belong to one request alone: each is exactly one of a new page, a snapshot and a live state."""

from collections.abc import Iterable, Mapping

import numpy as np

from hicache.coverage import Checkpoint, Coverage
from hicache.units import HOLE, Int32Array, PoolName

Slots = Mapping[PoolName, Int32Array]


class Lent:
    """What a request was lent and has not shared yet.

    Token pools: a slot per page, for `pages` pages after those it shares with the tree. Checkpoint pools: one live
    slot, and snapshots by page (page p - 1 is the state at boundary p, counted from the start of the prompt).
    """

    def __init__(self, coverages: Mapping[PoolName, Coverage]) -> None:
        self.pages = 0
        self.live: dict[PoolName, int] = {}
        self._snapshots: dict[PoolName, dict[int, int]] = {
            pool: {} for pool, coverage in coverages.items() if isinstance(coverage, Checkpoint)
        }
        self._runs: dict[PoolName, Int32Array] = {pool: _EMPTY for pool in coverages if pool not in self._snapshots}

    @property
    def token_pools(self) -> Iterable[PoolName]:
        """Pools with a slot per page."""
        return self._runs.keys()

    @property
    def state_pools(self) -> Iterable[PoolName]:
        """Pools with a live state and snapshots of it."""
        return self._snapshots.keys()

    def all(self) -> dict[PoolName, Int32Array]:
        """Every slot, per pool: of pages in their order, or of snapshots and the live state."""
        found = dict(self._runs)
        for pool, snapshots in self._snapshots.items():
            live = [self.live[pool]] if pool in self.live else []
            found[pool] = np.array([*snapshots.values(), *live], dtype=np.int32)
        return found

    def move(self, slots: Slots) -> None:
        """The same account lies in other slots now: those of `all`, holes left out, in their order."""
        for pool, run in self._runs.items():
            moved = run.copy()
            moved[run != HOLE] = slots.get(pool, _EMPTY)
            self._runs[pool] = moved
        for pool, snapshots in self._snapshots.items():
            order = slots.get(pool, _EMPTY).tolist()
            self._snapshots[pool] = dict(zip(snapshots, order, strict=False))
            if pool in self.live:
                self.live[pool] = order[-1]

    def with_shared(self, first: int, runs: Slots) -> "Lent":
        """A copy that also has the slots in `runs`: those of pages from `first` on, up to the pages it was lent."""
        wider = Lent({})
        wider.pages = self.pages + max((len(run) for run in runs.values()), default=0)
        wider.live = dict(self.live)
        wider._runs = {pool: np.concatenate((runs[pool], run)) for pool, run in self._runs.items()}
        for pool, held in self._snapshots.items():
            pages = {first + int(at): int(runs[pool][at]) for at in np.flatnonzero(runs[pool] != HOLE)}
            wider._snapshots[pool] = pages | held
        return wider

    def has_snapshot(self, pool: PoolName, page: int) -> bool:
        """Whether it was lent a slot for the snapshot that page `page` of a pool is."""
        return page in self._snapshots[pool]

    def has_snapshots(self, stop: int) -> bool:
        """Whether there are snapshots before page `stop`."""
        return any(page < stop for snapshots in self._snapshots.values() for page in snapshots)

    def extend(self, run: Int32Array, pool: PoolName) -> Int32Array:
        """A pool's slots by page: `run`, which it shares, then those it was lent; its own snapshots before shared."""
        if pool in self._runs:
            return np.concatenate((run, self._runs[pool]))
        whole = np.concatenate((run, np.full(self.pages, HOLE, dtype=np.int32)))
        for page, slot in self._snapshots[pool].items():
            whole[page] = slot
        return whole

    def add_live(self, slots: Slots) -> Slots:
        """The first slot ever of a Checkpoint pool is its live one. Returns the rest."""
        left = dict(slots)
        for pool in self._snapshots:
            if pool in slots and pool not in self.live:
                self.live[pool] = int(slots[pool][0])
                left[pool] = slots[pool][1:]
        return {pool: run for pool, run in left.items() if len(run)}

    def add(self, slots: Slots, pages: int, snapshot_page: int) -> None:
        """Take `pages` pages of slots, and those of the snapshots that page `snapshot_page` is."""
        self.pages += pages
        for pool, run in slots.items():
            if pool in self._runs:
                self._runs[pool] = np.concatenate((self._runs[pool], run))
            else:
                self._snapshots[pool][snapshot_page] = int(run[0])

    def offer(self, start: int, stop: int, snapshots: bool) -> tuple[int, dict[PoolName, Int32Array]]:
        """What the tree may have of pages up to `stop`, of which those from `start` on are lent: first page and runs.

        Snapshots may lie before `start`.
        """
        first = min([start, *self._pages_of_snapshots(stop)]) if snapshots else start
        runs = {pool: np.concatenate((_holes(start - first), run[: stop - start])) for pool, run in self._runs.items()}
        for pool, held in self._snapshots.items():
            runs[pool] = _holes(stop - first)
            for page, slot in held.items():
                if snapshots and page < stop:
                    runs[pool][page - first] = slot
        return first, runs

    def take_pages(self, count: int) -> None:
        """The first `count` pages' slots are somebody else's now."""
        self.pages -= count
        self._runs = {pool: run[count:] for pool, run in self._runs.items()}

    def take_snapshots(self, start: int = 0, stop: int | None = None) -> dict[PoolName, Int32Array]:
        """The snapshots of pages `start` to `stop` (default: all after it) are somebody else's now: their slots."""
        taken = {}
        for pool, snapshots in self._snapshots.items():
            pages = [page for page in snapshots if start <= page and (stop is None or page < stop)]
            if pages:
                taken[pool] = np.array([snapshots.pop(page) for page in pages], dtype=np.int32)
        return taken

    def _pages_of_snapshots(self, stop: int) -> list[int]:
        return [page for snapshots in self._snapshots.values() for page in snapshots if page < stop]


_EMPTY: Int32Array = np.empty(0, dtype=np.int32)


def _holes(count: int) -> Int32Array:
    return np.full(count, HOLE, dtype=np.int32)
