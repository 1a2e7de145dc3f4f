"""A frame goes to every rank of a torch process group and comes from every one, or an error names who is missing."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import distributed

from hicache.errors import ConfigError, RankError

FRAME_BYTES = 8192

_TAGS = 1 << 30


class TorchChannel:
    """The channel of one rank over a gloo group. Its n-th frame carries tag n, so that steps are never mixed up.

    A rank that is silent for `timeout_s` seconds is late. Raises ConfigError for a group of another backend.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup | None = None,
        *,
        timeout_s: float = 30.0,
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        backend = distributed.get_backend(group)
        if backend != "gloo":
            raise ConfigError(
                f"the process group's backend is {backend}; ranks agree on the host:"
                " give torch.distributed.new_group(backend='gloo')"
            )
        self._group = group
        self._timeout_s = timeout_s
        self._frame_bytes = frame_bytes
        self._rank = distributed.get_rank(group)
        self._ranks = distributed.get_world_size(group)
        self._others = [rank for rank in range(self._ranks) if rank != self._rank]
        self._exchanges = 0

    @property
    def rank(self) -> int:
        """Which rank of the group this one is."""
        return self._rank

    @property
    def ranks(self) -> int:
        """How many the group has."""
        return self._ranks

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame."""
        return self._frame_bytes

    def exchange(self, frame: bytes) -> Callable[[], Sequence[bytes]]:
        """Send a frame to all others; the result waits for theirs. Raises RankError when a rank is gone or late."""
        tag, self._exchanges = self._exchanges % _TAGS, self._exchanges + 1
        frames = [torch.empty(self._frame_bytes, dtype=torch.uint8) for _ in range(self._ranks)]
        frames[self._rank] = own = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        works: list[tuple[int, distributed.Work | None]] = []
        for rank in self._others:
            try:
                works.append((rank, distributed.irecv(frames[rank], group=self._group, group_src=rank, tag=tag)))
                works.append((rank, distributed.isend(own, group=self._group, group_dst=rank, tag=tag)))
            except RuntimeError as error:
                raise _missing(rank, error) from error
        return lambda: self._collect(works, frames)

    def _collect(
        self, works: Sequence[tuple[int, distributed.Work | None]], frames: Sequence[torch.Tensor]
    ) -> list[bytes]:
        deadline_s = time.monotonic() + self._timeout_s
        for rank, work in works:
            left_s = max(0.001, deadline_s - time.monotonic())
            try:
                if work is not None:
                    work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                raise _missing(rank, error) from error
        return [frame.numpy().tobytes() for frame in frames]


def _missing(rank: int, error: RuntimeError) -> RankError:
    return RankError(f"rank {rank} is gone or late: {str(error).splitlines()[0]}")
