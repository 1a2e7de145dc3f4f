"""What a host smaller than the device can't take at once goes through it to storage, piece by piece, root first."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hicache.controller.backup import Backups
from hicache.controller.state import State
from hicache.controller.stores import Attachment
from hicache.transfer.messages import Event
from hicache.tree import Span
from hicache.units import BoolArray, PoolName, Tier

MOST_STREAMS = 64
"""The most prefixes that wait for their turn; of more, the oldest are dropped, as they would be without this."""

PIECE_PAGES = 256
"""The most pages of one pool in a piece; on a small host a piece gets half of it, so that the other half is stored."""


@dataclass(slots=True)
class _Stream:
    """A prefix on its way. `reached`: its pages up to there have had their turn; `offered`: what was so when storage
    was last offered all that is on the host.
    """

    span: Span
    after: Event | None
    reached: int = 0
    offered: int = -1


class Streams:
    """Copies to the host what is on the device alone and not stored yet; once it is stored, it makes room for more."""

    def __init__(
        self,
        state: State,
        backups: Backups,
        store: Callable[[Span], None],
        attachment: Callable[[], Attachment | None],
    ) -> None:
        self._state = state
        self._backups = backups
        self._store = store
        self._attachment = attachment
        self._waiting: deque[_Stream] = deque(maxlen=MOST_STREAMS)
        anchor = state.group.anchor_entry
        self._small_host = anchor.host_pool.slots < anchor.device_pool.slots

    def add(self, span: Span, after: Event | None) -> None:
        """A span (from page 0), computed once `after` has passed, that the host has no room for."""
        if self._attachment() is None or not self._small_host:
            return
        known = next((stream for stream in self._waiting if stream.span.node is span.node), None)
        if known is None:
            self._waiting.append(_Stream(span, after))
        else:
            known.span, known.after = span, after
        self.step()

    def step(self) -> None:
        """Begin what there is room for."""
        while self._waiting:
            stream, attachment = self._waiting[0], self._attachment()
            piece = None
            if attachment is not None and self._state.tree.holds(stream.span):
                piece = self._piece(stream, attachment.epoch)
            if piece is None:
                self._waiting.popleft()
            elif not self._begin(stream, *piece):
                return

    def _piece(self, stream: _Stream, epoch: int) -> tuple[int, Mapping[PoolName, BoolArray]] | None:
        """Where the next piece ends, and what is lacking. None when nothing is, or what was tried was not stored."""
        span = stream.span
        lacking = {
            pool: pages & self._state.tree.unstored(span, pool, epoch)
            for pool, pages in self._backups.lacking(span).items()
        }
        lacking = {pool: pages for pool, pages in lacking.items() if pages.any()}
        if min((int(pages.argmax()) for pages in lacking.values()), default=-1) < stream.reached:
            return None
        stop = span.stop
        for pool, pages in lacking.items():
            most = min(PIECE_PAGES, max(1, self._state.group.get_pool(pool).slots // 2))
            places = np.flatnonzero(pages)
            if len(places) > most:
                stop = min(stop, int(places[most]))
        return stop, lacking

    def _begin(self, stream: _Stream, stop: int, lacking: Mapping[PoolName, BoolArray]) -> bool:
        """False when it has to wait for room."""
        state = self._state
        if stream.offered != stream.reached:
            stream.offered = stream.reached
            self._store(stream.span)
        counts = {pool: int(pages[:stop].sum()) for pool, pages in lacking.items()}
        with state.tree.asking(stream.span):
            short = any(count > state.room(pool, Tier.HOST) for pool, count in counts.items())
        if short:
            return False
        starts = {pool: int(lacking[pool].argmax()) if counts.get(pool) else stop for pool in state.pools}
        part = Span(stream.span.node, 0, stop)
        if self._backups.start_with(part, starts, {}, stream.after) is None:
            return False
        stream.reached = 1 + max(
            int(np.flatnonzero(pages[:stop])[-1]) for pool, pages in lacking.items() if counts[pool]
        )
        return True
