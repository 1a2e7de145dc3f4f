"""S38, several ranks: a host size is for all ranks of a machine together, and had for all of them or refused on all."""

import logging

import pytest

from hicache.builder import build_kv_cache, split_sizes
from hicache.builder import ranks as builder_ranks
from hicache.config import CacheConfig
from hicache.controller import DistributedAgree
from hicache.errors import ConfigError
from hicache.testing.ranks import VirtualRanks
from hicache.units import Tier
from tests.world import KINDS, PAGE

RANKS = 4
CONFIG = CacheConfig(device_size="64KiB", host_size="1MiB", page_size=PAGE)
MODEL = KINDS["everything"]


def start(config: CacheConfig, monkeypatch: pytest.MonkeyPatch, limit: int) -> list[dict[Tier, int] | str]:
    """Bytes that each rank has by tier, or what it was told, under a limit that each of them sees as its own."""
    monkeypatch.setattr(builder_ranks, "available_memory_bytes", lambda: limit)
    group = VirtualRanks(RANKS, timeout_s=10.0)

    def one(rank: int) -> dict[Tier, int] | str:
        try:
            cache = build_kv_cache(MODEL, config, agree=DistributedAgree(group.channels[rank]))
        except ConfigError as error:
            return str(error)
        taken = {
            tier: sum(one.slots * one.slot_bytes for one in cache.stats().pools if one.tier is tier) for tier in Tier
        }
        cache.close()
        return taken

    return group.run(one)


def test_pools_of_all_ranks_take_no_more_than_the_size(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="hicache")
    answers = start(CONFIG, monkeypatch, 1 << 40)
    taken = [answer for answer in answers if isinstance(answer, dict)]
    assert len(taken) == RANKS
    assert 0.8 * CONFIG.host_size < sum(one[Tier.HOST] for one in taken) <= CONFIG.host_size
    assert all(0.8 * CONFIG.device_size < one[Tier.DEVICE] <= CONFIG.device_size for one in taken)
    assert "ranks [0, 1, 2, 3] of this machine: host_size=1MiB in all, 256KiB each" in caplog.text


def test_a_limit_that_each_rank_alone_would_keep_is_refused_for_all(monkeypatch):
    needed = CONFIG.host_size + RANKS * CONFIG.device_size
    answers = start(CONFIG, monkeypatch, needed - 1)
    assert len(set(map(str, answers))) == 1
    assert "ranks [0, 1, 2, 3] of this machine need 1280KiB (320KiB + 320KiB + 320KiB + 320KiB)" in str(answers[0])
    assert all(isinstance(answer, dict) for answer in start(CONFIG, monkeypatch, needed))


def test_ranks_of_another_machine_do_not_count(monkeypatch):
    names = iter(["one", "two", "two", "three"])
    monkeypatch.setattr(builder_ranks, "_host_identity", lambda: next(names))
    answers = start(CONFIG.replace(host_size="512KiB"), monkeypatch, 700_000)
    taken = [answer[Tier.HOST] for answer in answers if isinstance(answer, dict)]
    assert taken == [taken[0]] * RANKS, "those that share a machine have half, and nobody more"
    most = split_sizes(MODEL, CONFIG.replace(host_size="256KiB")).host["kv"]
    assert taken[0] <= most * MODEL.slot_bytes <= 1 << 18
