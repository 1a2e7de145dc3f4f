"""Several ranks settle a transfer in the step in which the last of them has reported it; a difference is an error."""

import logging
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from hicache.controller.agree import Seen, Subject
from hicache.controller.frames import (
    HEADER_BYTES,
    REPORT_BYTES,
    Frame,
    Report,
    decode_frame,
    encode_failed,
    encode_frame,
    encode_report,
)
from hicache.controller.place import Place
from hicache.errors import ConfigError, RankError
from hicache.transfer.messages import Completion

log = logging.getLogger("hicache.ranks")

Exchange: TypeAlias = Callable[[], Sequence[bytes]]
"""Waits for the frames of all ranks, in their order. Raises RankError within a deadline."""

_GATHER = struct.Struct("<4sQ")
"""magic, bytes of the message that follows in frames of its own."""
_MAGIC = b"hcg1"


class Channel(Protocol):
    """Carries one frame of each rank to every rank: the n-th exchange of one goes with the n-th of the others."""

    @property
    def rank(self) -> int:
        """Which rank this one is, from 0 on."""

    @property
    def ranks(self) -> int:
        """How many there are."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame, the same on every rank."""

    def exchange(self, frame: bytes) -> Exchange:
        """Send this rank's frame. Returns at once with what waits for the others'. Raises RankError."""


@dataclass(slots=True)
class _Open:
    """A transfer that not every rank has reported."""

    own: Completion | None = None
    others: dict[int, Report] = field(default_factory=dict)


class DistributedAgree:
    """Agreement of the ranks on a channel. Every rank polls once per step, whatever it has to do in that step.

    With `behind` 0, a step waits until every rank has reached it: for ranks that compute a step together. With
    `behind` 1, a step settles what was seen in the step before, and a rank may be one step ahead of the slowest: for
    stages of a pipeline. Time is that of rank 0. Without `place`, each rank has a shard of every layer.
    """

    def __init__(self, channel: Channel, *, behind: int = 0, place: Place | None = None) -> None:
        if behind < 0:
            raise ConfigError(f"behind={behind}: it is a count of steps, 0 or more")
        if channel.frame_bytes < HEADER_BYTES + REPORT_BYTES:
            raise ConfigError(f"a frame has {channel.frame_bytes} bytes; give it {HEADER_BYTES + REPORT_BYTES} or more")
        self._channel = channel
        self._behind = behind
        self._place = place if place is not None else Place(channel.rank, channel.ranks)
        self._steps = 0
        self._now_s = 0.0
        self._sums = dict.fromkeys(Subject, 0)
        self._unsent: deque[bytes] = deque()
        self._pending: deque[tuple[int, Exchange]] = deque()
        self._open: dict[int, _Open] = {}
        self._error: str | None = None

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self._channel.ranks

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        return self._channel.rank

    @property
    def place(self) -> Place:
        """Which part of the model it has."""
        return self._place

    @property
    def steps(self) -> int:
        """How many steps this rank has made: as many as collective calls."""
        return self._steps

    def gather(self, message: bytes) -> tuple[bytes, ...]:
        """What every rank says at the start. Raises RankError."""
        self._require_whole()
        try:
            return self._gather(message)
        except RankError as error:
            self._error = str(error)
            raise

    def _gather(self, message: bytes) -> tuple[bytes, ...]:
        size = self._channel.frame_bytes
        heads = [_GATHER.unpack_from(head) for head in self._exchange(_GATHER.pack(_MAGIC, len(message)))]
        strangers = [rank for rank, (magic, _) in enumerate(heads) if magic != _MAGIC]
        if strangers:
            raise RankError(
                f"ranks {strangers} are not starting, or run another version of hicache; start all together"
            )
        said = [b""] * self.ranks
        for start in range(0, max(length for _, length in heads), size):
            parts = self._exchange(message[start : start + size])
            said = [before + part for before, part in zip(said, parts, strict=True)]
        return tuple(text[:length] for text, (_, length) in zip(said, heads, strict=True))

    def _exchange(self, part: bytes) -> Sequence[bytes]:
        return self._channel.exchange(part.ljust(self._channel.frame_bytes, b"\0"))()

    def step(self, seen: Seen) -> Sequence[Completion]:
        """What every rank has seen. Raises RankError, from the first time on always."""
        self._require_whole()
        try:
            return self._step(seen)
        except RankError as error:
            self._error = str(error)
            raise

    def now(self, local_s: float) -> float:
        """The time of rank 0 when it made the step that was settled last; it never goes back."""
        return self._now_s

    def note(self, subject: Subject, *parts: bytes) -> None:
        """Add to what is compared in the next step."""
        for part in parts:
            self._sums[subject] = zlib.crc32(part, self._sums[subject])

    def leave(self) -> Sequence[Completion]:
        """What this rank has seen and the others have not, by id."""
        left, self._open = self._open, {}
        return [one.own for _, one in sorted(left.items()) if one.own is not None]

    def _require_whole(self) -> None:
        if self._error is not None:
            raise RankError(f"the ranks no longer agree, start all of them again; what happened: {self._error}")

    def _step(self, seen: Seen) -> Sequence[Completion]:
        for completion in seen.completions:
            self._open.setdefault(completion.id, _Open()).own = completion
            self._unsent.append(self._report(completion))
        self.note(Subject.STANDING, seen.standing())
        sums = (self._sums[Subject.REQUESTS], self._sums[Subject.TRANSFERS], self._sums[Subject.STANDING])
        frame = Frame(self.ranks, self.rank, self._steps, seen.now_s, sums)
        data = encode_frame(frame, self._fitting(), self._channel.frame_bytes)
        self._pending.append((self._steps, self._channel.exchange(data)))
        self._steps += 1
        if len(self._pending) <= self._behind:
            return ()
        step, exchange = self._pending.popleft()
        frames = [decode_frame(data) for data in exchange()]
        self._compare(step, frames)
        self._now_s = max(self._now_s, frames[0].now_s)
        return self._settle(frames)

    def _report(self, completion: Completion) -> bytes:
        report = encode_report(completion)
        if HEADER_BYTES + len(report) <= self._channel.frame_bytes:
            return report
        log.warning("transfer %d: its bitmaps are larger than a frame, so all of it counts as failed", completion.id)
        return encode_failed(completion)

    def _fitting(self) -> bytes:
        """As many reports as one frame holds, oldest first."""
        room = self._channel.frame_bytes - HEADER_BYTES
        taken = []
        while self._unsent and len(self._unsent[0]) <= room:
            taken.append(self._unsent.popleft())
            room -= len(taken[-1])
        return b"".join(taken)

    def _compare(self, step: int, frames: Sequence[Frame]) -> None:
        """Raises RankError, with the ranks that differ, unless all frames are of one step and one state."""
        for rank, frame in enumerate(frames):
            if (frame.ranks, frame.rank) != (self.ranks, rank):
                raise RankError(f"rank {rank} of {self.ranks} takes itself for rank {frame.rank} of {frame.ranks}")
            if frame.step != step:
                raise RankError(f"rank {rank} is in step {frame.step}, rank {self.rank} in {step}: one has not polled")
        for number, subject in enumerate(Subject):
            others = [rank for rank, frame in enumerate(frames) if frame.sums[number] != frames[0].sums[number]]
            if others:
                raise RankError(f"step {step}: ranks {others} {subject.value} than rank 0")

    def _settle(self, frames: Sequence[Frame]) -> Sequence[Completion]:
        """The transfers that the last rank has reported in these frames."""
        ended = []
        for rank, frame in enumerate(frames):
            for report in frame.reports:
                one = self._open.setdefault(report.id, _Open())
                one.others[rank] = report
                if len(one.others) == self.ranks:
                    ended.append(report.id)
        return [_joined(self._open.pop(number)) for number in sorted(ended)]


def _joined(one: _Open) -> Completion:
    """What is right on every rank."""
    if one.own is None:
        raise RankError("a transfer was settled that this rank has not seen")
    good = dict(one.own.good)
    for report in one.others.values():
        good = report.narrow(good)
    error = one.own.error
    if error is None and any(report.failed for report in one.others.values()):
        error = "failed on another rank"
    return replace(one.own, good=good, error=error, late=any(report.late for report in one.others.values()))
