"""Real ranks over gloo and one file store: other losses on each, equal trees and hits; a killed one has a name."""

import logging
import os
import random
import signal
from pathlib import Path

import pytest

from hicache.controller import DistributedAgree
from hicache.device.channel import TorchChannel
from hicache.errors import RankError
from hicache.storage import open_store
from hicache.transfer import ThreadExecutor
from tests.controller.driver import step
from tests.controller.rank_driver import Ending, RankDriver, place_of, simulated, walk_one
from tests.gloo import run_ranks


def driver_of(channel: TorchChannel, folder: Path, seed: int, stages: int, *, threads: bool) -> RankDriver:
    """A rank whose pages lie in a folder of all ranks."""
    agree = DistributedAgree(channel, behind=stages - 1, place=place_of(channel.rank, channel.ranks, stages))
    store = folder / f"store{seed}"
    return RankDriver(
        seed,
        agree,
        lambda number: open_store(f"file:{store}.{number}"),
        (lambda luck: ThreadExecutor()) if threads else simulated,
    )


def walk_then_die(rank: int, folder: Path, seeds: int, steps: int, stages: int) -> list[Ending]:
    """Walks with delays from the simulator and from real threads; in the last the last rank is killed half-way."""
    logging.disable(logging.WARNING)
    channel = TorchChannel(timeout_s=20.0)
    endings = []
    for seed in range(seeds):
        driver = driver_of(channel, folder, seed, stages, threads=seed % 2 == 1)
        endings.append(walk_one(driver, seed, steps))
    driver = driver_of(channel, folder, seeds, stages, threads=True)
    dice = random.Random(seeds)
    with pytest.raises(RankError, match=f"rank {channel.ranks - 1} is gone or late"):
        for number in range(1000):
            if number == 10 and rank == channel.ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step(driver, dice)
    driver.cache.close()
    return endings


def check(answers: dict[int, list[Ending]], ranks: int, seeds: int) -> None:
    assert list(answers) == list(range(ranks - 1)), "the last was killed, the others have answered"
    for rank, endings in answers.items():
        assert isinstance(endings, list), endings
        assert len(endings) == seeds
        assert endings == answers[0], rank


@pytest.mark.parametrize(("ranks", "stages", "seeds", "steps"), [(2, 1, 2, 20), (4, 2, 1, 15)])
def test_ranks_end_alike_and_miss_the_one_that_is_killed(
    tmp_path: Path, ranks: int, stages: int, seeds: int, steps: int
):
    check(dict(run_ranks(ranks, walk_then_die, tmp_path, seeds, steps, stages)), ranks, seeds)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_long_walks_end_alike(tmp_path: Path, ranks: int, stages: int):
    check(dict(run_ranks(ranks, walk_then_die, tmp_path, 10, 60, stages)), ranks, 10)
