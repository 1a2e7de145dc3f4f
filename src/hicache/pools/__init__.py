"""All pools or none; a slot is free, cached, lent or in flight, exactly one of them."""

from hicache.pools.device import DevicePool
from hicache.pools.entry import PoolEntry
from hicache.pools.group import HostPoolGroup
from hicache.pools.host import HostPool, PoolCapabilities
from hicache.pools.registration import GroupCapabilities
from hicache.pools.reservation import Reservation
from hicache.pools.slots import SlotAllocator
from hicache.pools.transfers import PoolTransfer

__all__ = [
    "DevicePool",
    "GroupCapabilities",
    "HostPool",
    "HostPoolGroup",
    "PoolCapabilities",
    "PoolEntry",
    "PoolTransfer",
    "Reservation",
    "SlotAllocator",
]
