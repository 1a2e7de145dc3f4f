"""Ranks start with one plan, or all of them are told the same reason why not, before any has taken memory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.builder import ModelDescription, PoolDescription, build_kv_cache, with_replicated
from hicache.cache import UnifiedRadixCache
from hicache.config import CacheConfig
from hicache.controller import DistributedAgree
from hicache.errors import ConfigError
from hicache.testing.ranks import VirtualRanks
from hicache.units import Tier
from tests.world import ONE_POOL, PAGE, THREE_POOLS, geometry

CONFIG = CacheConfig(device_size=1 << 16, host_size=1 << 18, page_size=PAGE)


def start(
    ranks: int,
    model: Callable[[int], ModelDescription] = lambda rank: ONE_POOL,
    config: Callable[[int], CacheConfig] = lambda rank: CONFIG,
    **options,
) -> list[UnifiedRadixCache | ConfigError]:
    """What each rank got."""
    group = VirtualRanks(ranks, timeout_s=10.0)

    def one(rank: int) -> UnifiedRadixCache | ConfigError:
        agree = DistributedAgree(group.channels[rank])
        try:
            return build_kv_cache(model(rank), config(rank), agree=agree, **options)
        except ConfigError as error:
            return error

    return group.run(one)


def slots(cache: UnifiedRadixCache) -> dict[tuple[str, Tier], int]:
    return {(pool.pool, pool.tier): pool.slots for pool in cache.stats().pools}


def refused(answers: list[UnifiedRadixCache | ConfigError]) -> str:
    """What all ranks were told."""
    messages = {str(answer) for answer in answers if isinstance(answer, ConfigError)}
    assert len(messages) == 1, answers
    assert all(isinstance(answer, ConfigError) for answer in answers)
    return messages.pop()


def closed(answers: list[UnifiedRadixCache | ConfigError]) -> None:
    for answer in answers:
        assert isinstance(answer, UnifiedRadixCache), answer
        answer.close()


def test_every_pool_is_as_large_as_on_the_smallest_rank():
    sizes = [(1 << 16, 1 << 18), (1 << 15, 1 << 18), (1 << 16, 1 << 17)]
    answers = start(
        3, lambda rank: THREE_POOLS, lambda rank: CONFIG.replace(device_size=sizes[rank][0], host_size=sizes[rank][1])
    )
    closed_slots = [slots(answer) for answer in answers if isinstance(answer, UnifiedRadixCache)]
    assert closed_slots[0] == closed_slots[1] == closed_slots[2]
    alone = [
        build_kv_cache(THREE_POOLS, CONFIG.replace(device_size=device, host_size=host // 3)) for device, host in sizes
    ]
    for (pool, tier), count in closed_slots[0].items():
        assert count == min(slots(cache)[pool, tier] for cache in alone)
    closed([*answers, *alone])


def test_stages_with_other_layers_have_the_slots_of_the_one_with_the_largest_pages():
    models = [
        ModelDescription(layers, (PoolDescription("kv", geometry(layers, 5), tuple(range(layers))),))
        for layers in (2, 5)
    ]
    answers = start(2, lambda rank: models[rank])
    assert [slots(answer)["kv", Tier.DEVICE] for answer in answers] == [(1 << 16) // models[1].slot_bytes] * 2
    closed(answers)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"write_policy": "write_back"}, "write_policy is write_through on rank 0 and write_back on rank 1"),
        ({"eviction_policy": "lfu"}, "eviction_policy is lru on rank 0 and lfu on rank 1"),
        ({"transfer_timeout_s": 1.0}, "transfer_timeout_s is 30.0 on rank 0 and 1.0 on rank 1"),
        ({"storage_url": "memory:"}, "storage_url is set is False on rank 0 and True on rank 1"),
    ],
)
def test_settings_that_decide_must_be_one(changes: dict, said: str):
    assert said in refused(start(2, config=lambda rank: CONFIG.replace(**changes) if rank else CONFIG))


def test_ranks_need_the_same_pools():
    assert "give each stage layers of every kind" in refused(start(2, lambda rank: [ONE_POOL, THREE_POOLS][rank]))


def test_a_rank_that_has_no_plan_says_so_to_all():
    answers = start(3, config=lambda rank: CONFIG.replace(device_size=1) if rank == 1 else CONFIG)
    assert refused(answers).startswith("rank 1: device_size=1B holds less than one page")


def test_a_store_that_one_rank_cannot_open_is_used_by_none(tmp_path: Path):
    (tmp_path / "taken").write_text("a file where a folder is to be")
    urls = ["memory:", f"file:{tmp_path}/taken"]
    answers = start(2, config=lambda rank: CONFIG.replace(storage_url=urls[rank]))
    for answer in answers:
        assert isinstance(answer, UnifiedRadixCache)
        assert answer.controller.storage is None
        assert answer.health()[0].startswith("rank 1: ")
    closed(answers)


def test_what_a_page_costs_is_counted_over_all_ranks():
    models = [
        ModelDescription(
            2,
            (
                PoolDescription("kv", geometry(1, wide), (0,)),
                PoolDescription("more", geometry(1, 40 - wide), (1,)),
            ),
        )
        for wide in (5, 30)
    ]
    answers = start(2, lambda rank: models[rank], lambda rank: CONFIG.replace(eviction_policy="cost-aware"))
    for answer in answers:
        state = answer.controller.state
        assert [pool.slot_bytes for pool in state.tree.pools] == [35 * PAGE, 45 * PAGE]
        assert state.size_bytes({"kv": 2, "more": 1}) == (2 * 35 + 45) * PAGE
    closed(answers)


def test_a_pool_that_ranks_hold_alike_must_be_there_and_be_so_on_all():
    assert [pool.replicated for pool in with_replicated(THREE_POOLS, "swa").pools] == [False, True, False]
    with pytest.raises(ConfigError, match=r"'latent'.*which has \['kv', 'swa', 'state'\]"):
        with_replicated(THREE_POOLS, "latent")
    models = [THREE_POOLS, with_replicated(THREE_POOLS, "swa")]
    assert "every rank needs the same pools" in refused(start(2, lambda rank: models[rank]))
