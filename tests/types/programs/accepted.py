"""Slots used where they belong: nothing here is an error."""

import numpy as np

from hicache.controller import HybridCacheController
from hicache.device.array import ArrayDevicePool
from hicache.device.torch import TorchDevicePool
from hicache.pools import DevicePool, HostPool, HostPoolGroup, PoolEntry, PoolTransfer, plan_backup, plan_load
from hicache.units import ByteArray, DeviceSlots, HostSlots


def copies(pool: DevicePool, pages: ByteArray, device: DeviceSlots, host: HostSlots) -> ByteArray:
    pool.backup(device, pages, host)
    pool.load_layer(device, pages, host, 0)
    return pool.stage(device)


def pools(array: ArrayDevicePool, tensors: TorchDevicePool, pages: ByteArray) -> None:
    slots = np.arange(3, dtype=np.int32)
    for pool in (array, tensors):
        copies(pool, pages, DeviceSlots(slots), HostSlots(slots))
    tensors.zero(DeviceSlots(slots))


def group(group: HostPoolGroup, entry: PoolEntry, device: DeviceSlots, host: HostSlots) -> None:
    group.free(host, "kv")
    group.get_pool("kv").free(host)
    transfer = PoolTransfer("kv", device, host)
    group.resolve_host_transfers([transfer], primary_device_indices=device, primary_host_indices=host)
    group.resolve_device_transfers([transfer], primary_device_indices=device, primary_host_indices=host)
    plan_backup(group, [transfer])
    plan_load(group, [transfer])
    if entry.device_free_fn is not None:
        entry.device_free_fn(device)


def physical(controller: HybridCacheController) -> HostPool:
    return controller.storage_host_pool


def all_of_them(controller: HybridCacheController) -> HostPoolGroup:
    return controller.mem_pool_host


def taken(pool: HostPool) -> HostSlots | None:
    return pool.alloc(3)
