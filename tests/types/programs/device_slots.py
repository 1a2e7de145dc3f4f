"""Host slots where device slots are meant. Each marked line is an error of the code it names."""

from hicache.device.array import ArrayDevicePool
from hicache.device.torch import TorchDevicePool
from hicache.pools import DevicePool, HostPoolGroup, PoolEntry, PoolTransfer
from hicache.units import ByteArray, DeviceSlots, HostSlots, Int32Array


def any_pool(pool: DevicePool, pages: ByteArray, device: DeviceSlots, host: HostSlots, plain: Int32Array) -> None:
    pool.backup(host, pages, host)  # error: arg-type
    pool.stage(host)  # error: arg-type
    pool.stage(plain)  # error: arg-type
    pool.load_layer(host, pages, host, 0)  # error: arg-type


def array_pool(pool: ArrayDevicePool, pages: ByteArray, device: DeviceSlots, host: HostSlots) -> None:
    pool.backup(host, pages, host)  # error: arg-type
    pool.stage(host)  # error: arg-type
    pool.load_layer(host, pages, host, 0)  # error: arg-type


def torch_pool(pool: TorchDevicePool, pages: ByteArray, device: DeviceSlots, host: HostSlots) -> None:
    pool.backup(host, pages, host)  # error: arg-type
    pool.stage(host)  # error: arg-type
    pool.load_layer(host, pages, host, 0)  # error: arg-type
    pool.zero(host)  # error: arg-type


def group(group: HostPoolGroup, entry: PoolEntry, host: HostSlots) -> None:
    transfer = PoolTransfer("kv", host, host)  # error: arg-type
    group.resolve_host_transfers([transfer], primary_device_indices=host, primary_host_indices=host)  # error: arg-type
    assert entry.device_free_fn is not None
    entry.device_free_fn(host)  # error: arg-type


def result(pool: HostPoolGroup) -> DeviceSlots | None:
    return pool.alloc(3)  # error: return-value
