"""What is promised to a tenant stays, whoever asks for slots; what accounts count is what a plain model counts."""

import random
from collections.abc import Mapping

import numpy as np
import pytest

from hicache.coverage import Checkpoint, Full, Window
from hicache.errors import ConfigError, InvariantError
from hicache.tree import Pin, RadixTree, Receipt, TreePool
from hicache.units import Tier

KV = (TreePool("kv", Full()),)
MANY = (TreePool("kv", Full()), TreePool("swa", Window(2)), TreePool("state", Checkpoint()))
PROMISED = {"a": 8, "b": 4}
TENANTS = ("a", "b", "c", "d")
TIERS = (Tier.DEVICE, Tier.HOST)


def name(tenant: str) -> bytes:
    return tenant.encode() * 32


class Slots:
    """Hands out numbers that nobody has."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> np.ndarray:
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.int32)


def new_tree(pools: tuple[TreePool, ...] = KV) -> RadixTree:
    tree = RadixTree(1, pools)
    tree.promise({tenant: {tier: {"kv": most} for tier in TIERS} for tenant, most in PROMISED.items()})
    for tenant in TENANTS:
        tree.own(name(tenant), tenant)
    return tree


def tokens(*ids: int) -> bytes:
    return np.array(ids, "<u4").tobytes()


def put(tree: RadixTree, slots: Slots, tenant: str, ids: list[int], tier: Tier = Tier.DEVICE) -> int:
    runs = {pool.name: slots.take(len(ids)) for pool in tree.pools}
    return tree.insert(name(tenant), tokens(*ids), 0, runs, tier).added["kv"]


def kv(tree: RadixTree, tier: Tier = Tier.DEVICE) -> dict[str, int]:
    return {owner: tiers[tier]["kv"] for owner, tiers in tree.owned().items()}


def evict(tree: RadixTree, tenant: str, count: int, tier: Tier = Tier.DEVICE) -> int:
    with tree.asking(name(tenant)):
        return tree.evict("kv", tier, count, drop_dirty=True).count("kv", tier)


def test_who_is_over_its_quota_gives_its_own_first() -> None:
    tree, slots = new_tree(), Slots()
    put(tree, slots, "c", [1, 2, 3])
    put(tree, slots, "b", [1, 2, 3, 4])
    put(tree, slots, "a", [*range(10)])
    assert evict(tree, "a", 2) == 2
    assert kv(tree) == {"": 3, "a": 8, "b": 4}
    assert evict(tree, "a", 2) == 2
    assert kv(tree) == {"": 1, "a": 8, "b": 4}


def test_what_is_promised_to_others_stays_and_ones_own_goes() -> None:
    tree, slots = new_tree(), Slots()
    put(tree, slots, "b", [1, 2, 3])
    put(tree, slots, "a", [*range(8)])
    assert evict(tree, "c", 5) == 0
    with tree.asking(name("a")):
        assert tree.evictable("kv", Tier.DEVICE) == 8
    assert evict(tree, "a", 100) == 8
    assert kv(tree) == {"": 0, "a": 0, "b": 3}
    assert tree.evict("kv", Tier.DEVICE, 100, drop_dirty=True).count("kv", Tier.DEVICE) == 3


def test_those_without_a_promise_share_an_account_and_its_order() -> None:
    tree, slots = new_tree(), Slots()
    put(tree, slots, "c", [1, 2])
    put(tree, slots, "d", [1, 2])
    assert evict(tree, "d", 2) == 2
    assert tree.match(name("c"), tokens(1, 2)).pages == 0
    assert tree.match(name("d"), tokens(1, 2)).pages == 2


def test_pages_keep_their_owner_under_another_name() -> None:
    tree, slots = new_tree(), Slots()
    put(tree, slots, "a", [1, 2, 3])
    tree.rename(name("a"), b"x" * 32)
    assert kv(tree)["a"] == 3
    put(tree, slots, "a", [1, 2, 3])
    assert kv(tree)["a"] == 6
    tree.check()


def test_quotas_are_set_once_and_first() -> None:
    tree = new_tree()
    with pytest.raises(ConfigError, match="once"):
        tree.promise({})
    other = RadixTree(1, KV)
    put(other, Slots(), "a", [1])
    with pytest.raises(InvariantError, match="before anything"):
        other.promise({})


@pytest.mark.parametrize("pools", [KV, MANY], ids=["one pool", "three pools"])
@pytest.mark.parametrize("seed", range(4))
def test_random_runs_agree_with_a_model(pools: tuple[TreePool, ...], seed: int) -> None:
    rng, slots, tree = random.Random(seed), Slots(), new_tree(pools)
    pins: list[Receipt] = []
    model: dict[tuple[Tier, str], int] = {(tier, owner): 0 for tier in TIERS for owner in ("", *PROMISED)}
    for _ in range(150):
        tenant, tier = rng.choice(TENANTS), rng.choice(TIERS)
        owner = tenant if tenant in PROMISED else ""
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 7))]
        match rng.randrange(4):
            case 0 | 1:
                model[tier, owner] += put(tree, slots, tenant, ids, tier)
            case 2:
                found = tree.match(name(tenant), tokens(*ids))
                pins.append(tree.pin(found, rng.choice([Pin.HERE, Pin.SOMEWHERE]), found.device_pages))
                if len(pins) > 3:
                    tree.unpin(pins.pop(rng.randrange(len(pins))))
            case _:
                _evict(tree, tenant, owner, tier, rng.randrange(1, 6), exact=pools is KV)
                model |= _counted(tree)
        tree.check()
        assert model == _counted(tree)


def _counted(tree: RadixTree) -> dict[tuple[Tier, str], int]:
    return {(tier, owner): count for tier in TIERS for owner, count in kv(tree, tier).items()}


def _evict(tree: RadixTree, tenant: str, owner: str, tier: Tier, count: int, *, exact: bool) -> None:
    before = kv(tree, tier)
    with tree.asking(name(tenant)):
        most = tree.evictable("kv", tier)
    freed = evict(tree, tenant, count, tier)
    _require_promises(before, kv(tree, tier), owner, exact=exact)
    if exact:
        assert freed == sum(before.values()) - sum(kv(tree, tier).values())
        assert min(count, most) <= freed or tier is Tier.HOST


def _require_promises(before: Mapping[str, int], after: Mapping[str, int], owner: str, *, exact: bool) -> None:
    for other, promised in PROMISED.items():
        lost = before[other] - after[other]
        if other != owner and before[other] <= promised:
            assert lost == 0
        elif other != owner and exact:
            assert after[other] >= promised
