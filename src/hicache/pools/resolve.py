"""Which slots a set of transfers still needs, and what they become once those are there. Pure: takes nothing itself."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hicache.errors import ConfigError, InvariantError
from hicache.pools.entry import PoolEntry
from hicache.pools.transfers import PoolTransfer, without_holes
from hicache.units import HOLE, Int32Array, PoolName, Tier

OTHER_TIER = {Tier.DEVICE: Tier.HOST, Tier.HOST: Tier.DEVICE}


@dataclass(frozen=True, slots=True)
class Resolution:
    """Transfers checked against the group's entries: `demand` is what must be taken in `tier` to resolve them."""

    tier: Tier
    transfers: tuple[PoolTransfer, ...]
    demand: Mapping[PoolName, int]
    sources: Mapping[PoolName, PoolName]
    primary: PoolTransfer

    def apply(self, taken: Mapping[PoolName, Int32Array]) -> tuple[PoolTransfer, ...]:
        """The resolved transfers, in the order given."""
        own = {self.primary.name: self.primary}
        for transfer in self.transfers:
            if transfer.name not in self.sources:
                own[transfer.name] = self._with_taken(transfer, taken)
        return tuple(self._resolved(transfer, own) for transfer in self.transfers)

    def _with_taken(self, transfer: PoolTransfer, taken: Mapping[PoolName, Int32Array]) -> PoolTransfer:
        if transfer.name not in self.demand:
            return transfer
        pattern = transfer.slots_on(OTHER_TIER[self.tier])
        slots = taken[transfer.name]
        if pattern is None or len(slots) == len(pattern):
            return transfer.with_slots(self.tier, slots)
        spread = np.full(len(pattern), HOLE, np.int32)
        spread[pattern != HOLE] = slots
        return transfer.with_slots(self.tier, spread)

    def _resolved(self, transfer: PoolTransfer, own: Mapping[PoolName, PoolTransfer]) -> PoolTransfer:
        source = own[self.sources.get(transfer.name, transfer.name)]
        return PoolTransfer(transfer.name, source.device_slots, source.host_slots)


def plan_resolution(
    transfers: Sequence[PoolTransfer], tier: Tier, primary: PoolTransfer, entries: Mapping[PoolName, PoolEntry]
) -> Resolution:
    """Checks the transfers and says what they need. Raises ConfigError or InvariantError, naming the pool at fault."""
    given = {transfer.name: transfer for transfer in transfers}
    if len(given) < len(transfers):
        raise InvariantError(f"a pool is named twice in one call: {[transfer.name for transfer in transfers]}")
    sources = _sources(given, entries)
    for name, source in sources.items():
        _require_source(name, source, given, tier, primary)
    demand = {
        name: _needed(transfer, tier)
        for name, transfer in given.items()
        if name not in sources and transfer.slots_on(tier) is None
    }
    for transfer in transfers:
        if transfer.device_slots is not None and transfer.host_slots is not None:
            transfer.pairs()
    return Resolution(tier, tuple(transfers), demand, sources, primary)


def _sources(names: Iterable[PoolName], entries: Mapping[PoolName, PoolEntry]) -> dict[PoolName, PoolName]:
    sources: dict[PoolName, PoolName] = {}
    for name in names:
        if name not in entries:
            raise ConfigError(f"pool {name!r} is not registered; there are {list(entries)}")
        source = entries[name].derived_from
        if source is not None:
            sources[name] = source
    return sources


def _require_source(
    name: PoolName, source: PoolName, given: Mapping[PoolName, PoolTransfer], tier: Tier, primary: PoolTransfer
) -> None:
    if source in given:
        return
    if source != primary.name:
        raise ConfigError(
            f"pool {name!r} lives at the slots of {source!r}, which is neither the anchor ({primary.name!r}) nor among"
            f" the transfers {list(given)}; add a transfer of {source!r}"
        )
    if primary.slots_on(tier) is None:
        raise ConfigError(
            f"pool {name!r} lives at the slots of the anchor {source!r}, and no {tier.value} slots of it were given;"
            f" pass primary_{tier.value}_indices"
        )


def _needed(transfer: PoolTransfer, tier: Tier) -> int:
    known = transfer.slots_on(OTHER_TIER[tier])
    if known is None:
        raise InvariantError(
            f"transfer of pool {transfer.name!r} has slots in neither tier, so how many it needs is not known;"
            f" give its {OTHER_TIER[tier].value} slots"
        )
    return len(without_holes(known))
