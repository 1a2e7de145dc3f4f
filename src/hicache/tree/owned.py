"""What is evicted goes for the sake of whoever asks, and nothing that is promised to others goes for that."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hicache.errors import InvariantError
from hicache.tree.accounts import Account
from hicache.tree.core import Core
from hicache.tree.freed import TIERS
from hicache.tree.node import DEVICE, HOST
from hicache.tree.values import Span
from hicache.units import PoolName, Tier


def place_of(tier: Tier) -> int:
    """A tier's number. Raises InvariantError for storage, of which the tree knows nothing."""
    if tier is Tier.DEVICE:
        return DEVICE
    if tier is Tier.HOST:
        return HOST
    raise InvariantError("the tree knows what is in device and host memory; what lies in storage has no node")


class Owned:
    """The part of a tree that knows whose pages are whose."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def evictable(self, pool: PoolName, tier: Tier) -> int:
        """How many slots `evict(..., drop_dirty=True)` could free now, for whoever asks."""
        core = self._core
        accounts, place = core.accounts, 2 * core.classes[core.pool(pool)] + place_of(tier)
        return accounts.evictable(place)

    def promise(self, slots: Mapping[str, Mapping[Tier, Mapping[PoolName, int]]]) -> None:
        """Promises slots to tenants by name: others never push them below that. Once, before anything is inserted."""
        core = self._core
        if core.roots:
            raise InvariantError("quotas are set before anything is cached")
        core.accounts.promise(
            {
                name: [tiers[tier].get(pool.name, 0) for pool in core.pools for tier in TIERS]
                for name, tiers in slots.items()
            }
        )

    def own(self, namespace: bytes, tenant: str) -> None:
        """The pages of a namespace are a tenant's; of no account of its own, if nothing was promised to that."""
        self._core.accounts.own(namespace, tenant)

    @contextmanager
    def asking(self, where: bytes | Span) -> Iterator[None]:
        """What is evicted meanwhile goes for the sake of the tenant of a namespace, or of a span."""
        accounts = self._core.accounts
        before, accounts.asking = accounts.asking, self._account(where)
        try:
            yield
        finally:
            accounts.asking = before

    def _account(self, where: bytes | Span) -> Account:
        if isinstance(where, Span):
            return where.node.account
        root = self._core.roots.get(where)
        return self._core.accounts.of(where) if root is None else root.account

    def owned(self) -> Mapping[str, Mapping[Tier, Mapping[PoolName, int]]]:
        """How many slots each tenant with a promise has, per tier and pool; "": all others together."""
        core = self._core
        return {
            account.name: {
                tier: {pool.name: account.held[2 * number + place] for number, pool in enumerate(core.pools)}
                for place, tier in enumerate(TIERS)
            }
            for account in core.accounts.all
        }

    def promised_to_others(self, pool: PoolName, tier: Tier, tenant: str) -> int:
        """How many slots of a pool are promised to other tenants. Any thread may ask."""
        place = 2 * self._core.pool(pool) + place_of(tier)
        others = [account for account in self._core.accounts.all if account.name != tenant]
        return sum(account.promised[place] for account in others if account.promised is not None)
