"""Transfers are frozen values: resolving one gives a new one, and what was passed in never changes."""

from dataclasses import dataclass

import numpy as np

from hicache.errors import InvariantError
from hicache.units import HOLE, DeviceSlots, HostSlots, Int32Array, PoolName, Tier


@dataclass(frozen=True, slots=True)
class PoolTransfer:
    """Pages of one pool that move between device and host: page i between device_slots[i] and host_slots[i].

    None means "not resolved yet". HOLE in both means that this pool has nothing at that page (a page behind the
    window), and nothing is taken, copied or freed for it.
    """

    name: PoolName
    device_slots: DeviceSlots | None = None
    host_slots: HostSlots | None = None

    def slots_on(self, tier: Tier) -> Int32Array | None:
        """The slots of this transfer in one tier (DEVICE or HOST)."""
        return self.device_slots if tier is Tier.DEVICE else self.host_slots

    def with_slots(self, tier: Tier, slots: Int32Array) -> "PoolTransfer":
        """The same transfer with its slots of one tier (DEVICE or HOST) set."""
        if tier is Tier.DEVICE:
            return PoolTransfer(self.name, DeviceSlots(slots), self.host_slots)
        return PoolTransfer(self.name, self.device_slots, HostSlots(slots))

    def pairs(self) -> tuple[DeviceSlots, HostSlots]:
        """The slots of both tiers, holes left out. Raises InvariantError unless resolved and of one shape."""
        device, host = self.device_slots, self.host_slots
        if device is None or host is None:
            raise InvariantError(f"transfer of pool {self.name!r} is not resolved: it has no slots in one tier")
        if len(device) != len(host):
            raise InvariantError(f"transfer of pool {self.name!r} has {len(device)} device and {len(host)} host slots")
        present = device != HOLE
        if not np.array_equal(present, host != HOLE):
            raise InvariantError(f"transfer of pool {self.name!r} has a slot in one tier where the other has a hole")
        return DeviceSlots(device[present]), HostSlots(host[present])


def without_holes(slots: Int32Array) -> Int32Array:
    """The slots that are not HOLE."""
    present: Int32Array = slots[slots != HOLE]
    return present
