"""All pools or none; a slot is free, cached, lent or in flight, exactly one of them."""

from hicache.pools.copies import BackupPlan, LayerCopy, LoadPlan, PoolCopy, plan_backup, plan_load
from hicache.pools.counts import GroupCounts, PoolCounts
from hicache.pools.device import DevicePool
from hicache.pools.entry import PoolEntry
from hicache.pools.group import HostPoolGroup
from hicache.pools.host import HostPool, PoolCapabilities
from hicache.pools.registration import GroupCapabilities
from hicache.pools.reservation import Reservation
from hicache.pools.rows import copy_rows
from hicache.pools.slots import SlotAllocator
from hicache.pools.transfers import PoolTransfer

__all__ = [
    "BackupPlan",
    "DevicePool",
    "GroupCapabilities",
    "GroupCounts",
    "HostPool",
    "HostPoolGroup",
    "LayerCopy",
    "LoadPlan",
    "PoolCapabilities",
    "PoolCopy",
    "PoolCounts",
    "PoolEntry",
    "PoolTransfer",
    "Reservation",
    "SlotAllocator",
    "copy_rows",
    "plan_backup",
    "plan_load",
]
