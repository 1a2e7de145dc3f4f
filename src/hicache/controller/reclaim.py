"""How slots become free: clean pages go at once, dirty ones are written back first or dropped, as the policy says."""

from hicache.controller.backup import Backups
from hicache.controller.state import State
from hicache.tree import Span
from hicache.units import PoolName, Tier


class Reclaimer:
    """The reclaim callbacks of every pool. They get the absolute slot count that must become free.

    Without `write_back`, device pages that have no host copy are dropped in their turn; they are counted.
    """

    def __init__(self, state: State, backups: Backups, *, write_back: bool) -> None:
        self._state = state
        self._backups = backups
        self._writes_back = write_back

    def evict_host(self, pool: PoolName, count: int) -> None:
        """Free host slots until `count` are free, as far as that goes."""
        state = self._state
        short = count - state.available(pool, Tier.HOST)
        if short > 0:
            state.free_eviction(state.tree.evict(pool, Tier.HOST, short, drop_dirty=True))

    def evict_device(self, pool: PoolName, count: int) -> None:
        """Free device slots until `count` are free. Pages without a host copy are written back first: they go later.

        When the host can't take them, they are dropped and counted.
        """
        state = self._state
        short = count - state.available(pool, Tier.DEVICE)
        if short <= 0:
            return
        if not self._writes_back:
            self._drop(pool, short)
            return
        state.free_eviction(state.tree.evict(pool, Tier.DEVICE, short, drop_dirty=False))
        short = count - state.available(pool, Tier.DEVICE)
        if short > 0:
            refused = [span for span in state.tree.dirty(pool, short) if not self._write_back(span)]
            self._drop(pool, sum(len(span) for span in refused))

    def _write_back(self, span: Span) -> bool:
        """Back up a span and what lies before it: a page is never on the host without its ancestors."""
        return self._backups.start(Span(span.node, 0, span.stop))

    def _drop(self, pool: PoolName, count: int) -> None:
        if count == 0:
            return
        state = self._state
        before = state.tree.dirty_count(pool)
        state.free_eviction(state.tree.evict(pool, Tier.DEVICE, count, drop_dirty=True))
        state.counters.dropped_pages += before - state.tree.dirty_count(pool)
