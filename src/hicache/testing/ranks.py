"""Ranks in one process: frames go from thread to thread, and a rank that ends is gone for the rest."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hicache.controller import Exchange
from hicache.controller.frames import FRAME_BYTES
from hicache.errors import RankError

T = TypeVar("T")


class VirtualRanks:
    """The channels of `ranks` ranks. Each belongs to one thread; `run` makes one for each."""

    def __init__(self, ranks: int, *, timeout_s: float = 30.0, frame_bytes: int = FRAME_BYTES) -> None:
        self.ranks = ranks
        self.frame_bytes = frame_bytes
        self.timeout_s = timeout_s
        self.channels = tuple(VirtualChannel(self, rank) for rank in range(ranks))
        self._frames: list[dict[int, bytes]] = []
        self._gone: list[int] = []
        self._changed = threading.Condition()

    @property
    def calls(self) -> tuple[int, ...]:
        """How many collective calls each rank has made."""
        with self._changed:
            return tuple(sum(rank in frames for frames in self._frames) for rank in range(self.ranks))

    def leave(self, rank: int) -> None:
        """The rank makes no more calls. Whoever waits for it gets RankError."""
        with self._changed:
            self._gone.append(rank)
            self._changed.notify_all()

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What `work(rank)` returns, each in a thread of its own. Raises what went wrong first, RankError last."""
        with ThreadPoolExecutor(self.ranks, "rank") as threads:
            futures = [threads.submit(self._work, work, rank) for rank in range(self.ranks)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, RankError)):
            raise error
        return [future.result() for future in futures]

    def _work(self, work: Callable[[int], T], rank: int) -> T:
        try:
            return work(rank)
        finally:
            self.leave(rank)

    def post(self, rank: int, number: int, frame: bytes) -> None:
        """A rank's frame of its exchange `number`."""
        with self._changed:
            while len(self._frames) <= number:
                self._frames.append({})
            self._frames[number][rank] = frame
            self._changed.notify_all()

    def collect(self, number: int) -> Sequence[bytes]:
        """All ranks' frames of exchange `number`. Raises RankError when one is gone or late."""
        with self._changed:
            frames = self._frames[number]
            self._changed.wait_for(lambda: len(frames) == self.ranks or self._missing(frames), self.timeout_s)
            if len(frames) == self.ranks:
                return [frames[rank] for rank in range(self.ranks)]
            late = [rank for rank in range(self.ranks) if rank not in frames]
        raise RankError(f"exchange {number}: ranks {late} are gone, or late by {self.timeout_s} s")

    def _missing(self, frames: dict[int, bytes]) -> bool:
        return any(rank not in frames for rank in self._gone)


class VirtualChannel:
    """One rank's end."""

    def __init__(self, group: VirtualRanks, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._exchanges = 0

    @property
    def rank(self) -> int:
        """Which rank this one is."""
        return self._rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._group.ranks

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame."""
        return self._group.frame_bytes

    def exchange(self, frame: bytes) -> Exchange:
        """Send a frame; the result waits for the others'."""
        if len(frame) != self.frame_bytes:
            raise RankError(f"a frame of {len(frame)} bytes, where every rank sends {self.frame_bytes}")
        number, self._exchanges = self._exchanges, self._exchanges + 1
        self._group.post(self._rank, number, frame)
        return lambda: self._group.collect(number)
