"""Frames between real processes: the right ones, of the right step, and a named error when a rank is gone or late."""

import os
import signal
import time
from pathlib import Path

import pytest
from torch import distributed

from hicache.device.channel import TorchChannel
from hicache.errors import ConfigError, RankError
from tests.gloo import run_ranks


def frame(rank: int, step: int) -> bytes:
    return bytes([rank, step]) * 50


def talk(rank: int, folder: Path) -> list[bool]:
    """Steps one by one, then with one under way; then the last rank stops answering, and dies."""
    channel = TorchChannel(timeout_s=2.0, frame_bytes=100)
    right = []
    for step in range(20):
        right.append(channel.exchange(frame(rank, step))() == [frame(one, step) for one in range(channel.ranks)])
    before = channel.exchange(frame(rank, 100))
    for step in range(101, 110):
        after = channel.exchange(frame(rank, step))
        right.append(before() == [frame(one, step - 1) for one in range(channel.ranks)])
        before = after
    before()
    if rank == channel.ranks - 1:
        time.sleep(2.5)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RankError, match=f"rank {channel.ranks - 1} is gone or late"):
            channel.exchange(frame(rank, 0))()
    return right


def test_frames_arrive_and_silence_has_a_name(tmp_path: Path):
    answers = run_ranks(2, talk, tmp_path)
    assert list(answers) == [0]
    assert answers[0] == [True] * 29


def test_a_group_that_is_not_on_the_host_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "get_backend", lambda group: "nccl")
    with pytest.raises(ConfigError, match=r"backend is nccl.*backend='gloo'"):
        TorchChannel()
