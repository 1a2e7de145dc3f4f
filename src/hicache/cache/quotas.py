"""What is promised to tenants is less than each tier has, and counted in the slots of every pool."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from hicache.controller.state import State
from hicache.errors import ConfigError
from hicache.units import PoolName, Tier

MOST_TENANTS = 100
"""How many tenants can have a quota: each eviction looks at all of them."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The shares of device and host memory, of every pool, that others don't push a tenant's cached pages below.

    A tenant may have more while nobody needs it; what it has beyond its quota goes first when it needs more itself.
    Raises ConfigError for what is no share.
    """

    device_share: float = 0.0
    host_share: float = 0.0

    def __post_init__(self) -> None:
        for name, share in (("device_share", self.device_share), ("host_share", self.host_share)):
            if not 0 <= share < 1:
                raise ConfigError(f"{name} is {share}; it is a share of the tier, from 0 to below 1")

    def share(self, tier: Tier) -> float:
        """The share of one tier."""
        return self.device_share if tier is Tier.DEVICE else self.host_share


def promise(state: State, sizes: Mapping[Tier, Mapping[PoolName, int]], quotas: Mapping[str, Quota]) -> None:
    """Promise every tenant its shares of `sizes`, in slots rounded down. Raises ConfigError for more than there is."""
    if len(quotas) > MOST_TENANTS:
        raise ConfigError(f"{len(quotas)} tenants have quotas; at most {MOST_TENANTS} can")
    for tier in sizes:
        total = sum(Fraction(str(quota.share(tier))) for quota in quotas.values())
        if total >= 1:
            raise ConfigError(
                f"quotas promise {float(total):g} of the {tier.value} tier; leave some for requests: below 1 in all"
            )
    state.tree.promise(
        {
            name: {
                tier: {pool: int(quota.share(tier) * slots) for pool, slots in pools.items()}
                for tier, pools in sizes.items()
            }
            for name, quota in quotas.items()
        }
    )


def held_bytes(state: State) -> Mapping[str, Mapping[Tier, int]]:
    """What each tenant with a quota has, per tier in bytes, and under "" all others; empty without quotas."""
    sizes = {pool.name: pool.slot_bytes for pool in state.tree.pools}
    owned = state.tree.owned()
    if len(owned) == 1:
        return {}
    return {
        name: {tier: sum(count * sizes[pool] for pool, count in pools.items()) for tier, pools in tiers.items()}
        for name, tiers in owned.items()
    }
