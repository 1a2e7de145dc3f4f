"""What a pool group knows of a device pool: it moves slots to and from host pages, and nothing else."""

from typing import Protocol

from hicache.layout import PoolGeometry
from hicache.units import ByteArray, DeviceSlots, HostSlots


class DevicePool(Protocol):
    """Slots of one kind of state in device memory. `pages` is always uint8 [host slots, geometry.slot_bytes].

    `pages` may be a column view of wider host pages: rows are apart, the bytes of a row are contiguous. Calls come
    from a worker and return when the bytes have arrived, or have been put on the stream that the pool works on.
    """

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def geometry(self) -> PoolGeometry:
        """What one slot holds."""

    @property
    def slots(self) -> int:
        """How many slots there are, reserved ones included."""

    def backup(self, slots: DeviceSlots, pages: ByteArray, rows: HostSlots) -> None:
        """Copies slots[i], all layers, to pages[rows[i]]."""

    def stage(self, slots: DeviceSlots) -> ByteArray:
        """The bytes of `slots`, all layers, gathered into a new contiguous array [len(slots), slot_bytes]."""

    def load_layer(self, slots: DeviceSlots, pages: ByteArray, rows: HostSlots, layer: int) -> None:
        """Copies layer `layer` (counted in this pool) of pages[rows[i]] to slots[i]."""
