"""Device slots where host slots are meant, and a group where a pool is. Each marked line is an error of that code."""

from hicache.controller import HybridCacheController
from hicache.device.torch import TorchDevicePool
from hicache.pools import DevicePool, HostPool, HostPoolGroup, PoolTransfer
from hicache.units import ByteArray, DeviceSlots, HostSlots, Int32Array


def copies(pool: DevicePool, pages: ByteArray, device: DeviceSlots, plain: Int32Array) -> None:
    pool.backup(device, pages, device)  # error: arg-type
    pool.backup(device, pages, plain)  # error: arg-type
    pool.load_layer(device, pages, device, 0)  # error: arg-type


def torch_copies(pool: TorchDevicePool, pages: ByteArray, device: DeviceSlots) -> None:
    pool.backup(device, pages, device)  # error: arg-type
    pool.load_layer(device, pages, device, 0)  # error: arg-type


def host_pool(pool: HostPool, group: HostPoolGroup, device: DeviceSlots, plain: Int32Array) -> None:
    pool.free(device)  # error: arg-type
    pool.free(plain)  # error: arg-type
    pool.require_held(device)  # error: arg-type
    group.free(device)  # error: arg-type
    transfer = PoolTransfer("kv", device, device)  # error: arg-type
    group.resolve_device_transfers(
        [transfer],
        primary_device_indices=device,
        primary_host_indices=device,  # error: arg-type
    )


def physical(controller: HybridCacheController) -> HostPool:
    return controller.mem_pool_host  # error: return-value


def stored(pool: HostPool) -> None:
    """Wants one physical pool."""


def attach(controller: HybridCacheController) -> None:
    stored(controller.mem_pool_host)  # error: arg-type
    stored(controller.storage_host_pool)
    pools: HostPoolGroup = controller.storage_host_pool  # error: assignment
    pools.close()


def swapped(device: DeviceSlots, host: HostSlots) -> tuple[DeviceSlots, HostSlots]:
    return host, device  # error: return-value


def assigned(device: DeviceSlots) -> None:
    host: HostSlots = device  # error: assignment
    host.sort()
