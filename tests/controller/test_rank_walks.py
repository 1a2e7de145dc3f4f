"""Ranks with other losses, delays and clocks decide alike: equal trees after every call, equal hits, equal calls."""

import logging

import pytest
from hypothesis import settings

from hicache.testing.ranks import VirtualRanks
from tests.controller.rank_driver import walk


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="hicache.transfer")


@pytest.mark.parametrize(("ranks", "stages", "behind"), [(2, 1, 0), (4, 2, 1)])
def test_seeded_walks_end_alike(ranks: int, stages: int, behind: int):
    for seed in range(max(2, settings.default.max_examples // 30)):
        group = VirtualRanks(ranks)
        try:
            first, *others = walk(group, seed, 30, behind=behind, stages=stages)
        except BaseException as error:
            error.add_note(f"walk({ranks} ranks, {seed=}, {stages=}, {behind=})")
            raise
        assert all(other == first for other in others)
        assert len(set(group.calls)) == 1
