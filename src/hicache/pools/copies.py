"""What a backup or a load copies, as frozen values a worker can run: they name memory and slots, never the group."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hicache.errors import InvariantError
from hicache.pools.device import DevicePool
from hicache.pools.entry import PoolEntry
from hicache.pools.group import HostPoolGroup
from hicache.pools.registration import first_uses
from hicache.pools.rows import copy_rows
from hicache.pools.transfers import PoolTransfer
from hicache.units import ByteArray, DeviceSlots, HostSlots, PoolName


@dataclass(frozen=True, slots=True)
class PoolCopy:
    """Slots of one device pool and the host pages they belong to, hole-free and of one length.

    `pages` is uint8 [host slots, device_pool.geometry.slot_bytes]: this device pool's columns of the host pages. A
    packed draft (`is_draft`) has its owner's slots.
    """

    pool: PoolName
    device_pool: DevicePool
    device_slots: DeviceSlots
    pages: ByteArray
    host_slots: HostSlots
    is_draft: bool

    def backup(self) -> None:
        """Device to host, each slot straight to its page."""
        self.device_pool.backup(self.device_slots, self.pages, self.host_slots)

    def backup_staged(self) -> None:
        """Device to host by way of one contiguous block, which is then scattered to the pages."""
        staged = self.device_pool.stage(self.device_slots)
        copy_rows(self.pages, self.host_slots, staged, np.arange(len(staged), dtype=np.int32))

    def load_layer(self, layer: int) -> None:
        """Host to device, one layer as counted in the device pool."""
        self.device_pool.load_layer(self.device_slots, self.pages, self.host_slots, layer)

    @property
    def nbytes(self) -> int:
        """Bytes moved when all layers are copied."""
        return len(self.device_slots) * self.device_pool.geometry.slot_bytes


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """One layer of one device pool, as counted there, of a load."""

    copy: PoolCopy
    layer: int

    def run(self) -> None:
        """Copies it."""
        self.copy.load_layer(self.layer)


@dataclass(frozen=True, slots=True)
class BackupPlan:
    """A backup of all pools it names, drafts included; `staged` when every pool of the group supports that."""

    copies: tuple[PoolCopy, ...]
    staged: bool

    def run(self) -> None:
        """Copies everything, pool after pool."""
        for copy in self.copies:
            if self.staged:
                copy.backup_staged()
            else:
                copy.backup()

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return sum(copy.nbytes for copy in self.copies)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load layer by layer: model layer i may run once everything in `layers[0]` to `layers[i]` has arrived.

    Of packed drafts, the layer at depth d (counted over all drafts of the owner) comes with model layer min(d, last).
    """

    layers: tuple[tuple[LayerCopy, ...], ...]
    nbytes: int

    def run_layer(self, layer: int) -> None:
        """Copies what model layer `layer` brings, of every pool."""
        for copy in self.layers[layer]:
            copy.run()


def plan_backup(group: HostPoolGroup, transfers: Sequence[PoolTransfer]) -> BackupPlan:
    """The backup of resolved transfers, staged if all of the group's entries declare it.

    Raises InvariantError when a transfer is not resolved, or a pool goes without those that live at its slots.
    """
    copies = [copy for transfer in _together(group, transfers) for copy in _copies(group, transfer)]
    return BackupPlan(tuple(copies), group.capabilities.staged_write_back)


def plan_load(group: HostPoolGroup, transfers: Sequence[PoolTransfer]) -> LoadPlan:
    """The load of resolved transfers. Raises InvariantError as `plan_backup` does."""
    layers: list[list[LayerCopy]] = [[] for _ in range(group.layer_count)]
    nbytes = 0
    for transfer in _together(group, transfers):
        own, *drafts = _copies(group, transfer)
        for layer, used in enumerate(first_uses(group.get_entry(transfer.name), group.layer_count)):
            if used is not None:
                layers[layer].append(LayerCopy(own, used))
        for depth, copy in enumerate(_by_depth(drafts)):
            layers[min(depth, group.layer_count - 1)].append(copy)
        nbytes += sum(copy.nbytes for copy in (own, *drafts))
    return LoadPlan(tuple(tuple(copies) for copies in layers), nbytes)


def _by_depth(drafts: Iterable[PoolCopy]) -> list[LayerCopy]:
    return [LayerCopy(copy, layer) for copy in drafts for layer in range(len(copy.device_pool.geometry.layers))]


def _together(group: HostPoolGroup, transfers: Sequence[PoolTransfer]) -> Sequence[PoolTransfer]:
    names = [transfer.name for transfer in transfers]
    missing = [entry.name for entry in group.entries if entry.derived_from in names and entry.name not in names]
    if missing:
        raise InvariantError(f"transfers of {names} leave out {missing}, derived from them; see derived_transfers")
    return transfers


def _copies(group: HostPoolGroup, transfer: PoolTransfer) -> list[PoolCopy]:
    entry: PoolEntry = group.get_entry(transfer.name)
    device_slots, host_slots = transfer.pairs()
    pages = entry.host_pool.pages
    layout = entry.host_pool.layout
    columns = [layout.own_range, *(layout.draft_range(i) for i in range(len(layout.drafts)))]
    pools = [entry.device_pool, *entry.packed_draft_device_pools]
    return [
        PoolCopy(entry.name, pool, device_slots, pages[:, part.start : part.stop], host_slots, is_draft=index > 0)
        for index, (pool, part) in enumerate(zip(pools, columns, strict=True))
    ]
