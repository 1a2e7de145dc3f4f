"""Device pools of plain numbers: the cache sees one array, [slots, layers, tokens per slot], as a pool of layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from hicache.device.array import ArrayDevicePool
from hicache.layout import PoolGeometry
from hicache.pools import PoolEntry
from hicache.simulate.broken import RuleError
from hicache.simulate.content import Code, WordArray, code
from hicache.units import HOLE, DeviceSlots, Int32Array, PoolName

GARBAGE = 0xA5A5A5A5A5A5A5A5
WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The words of one pool. `name` is also what its content is encoded by."""

    name: PoolName
    words: WordArray
    code: Code

    @property
    def page_tokens(self) -> int:
        """Tokens per slot; 1 for snapshots."""
        return int(self.words.shape[2])

    @property
    def layers(self) -> int:
        """Layers of the pool."""
        return int(self.words.shape[1])

    def write(self, slots: DeviceSlots, start: int, hashes: WordArray) -> None:
        """Puts what belongs to the prefixes with these hashes at positions `start`, `start + 1`, ..."""
        rows, offsets = self._places(slots, start, start + len(hashes))
        self.words[rows, :, offsets] = self.code.encode(hashes)

    def read(self, slots: DeviceSlots, start: int, stop: int) -> WordArray:
        """What lies at positions `start` to `stop`: [tokens, layers]. Raises RuleError where there is no slot."""
        first = start // self.page_tokens
        pages = np.asarray(slots[first : -(-stop // self.page_tokens)])
        if (pages == HOLE).any():
            raise RuleError("slots", f"pool {self.name!r} has no slot for tokens from {start} to {stop}: {pages}")
        found = self.words[pages].transpose(0, 2, 1).reshape(-1, self.layers)
        base = first * self.page_tokens
        part: WordArray = found[start - base : stop - base]
        return part

    def write_state(self, slot: int, hashed: int) -> None:
        """Puts the snapshot after the prefix with this hash into a slot."""
        self.words[slot, :, 0] = self.code.encode(np.array([hashed], np.uint64))[0]

    def read_state(self, slot: int) -> int | None:
        """The hash of the prefix whose snapshot a slot holds; None if its layers contradict each other."""
        words = self.words[slot, :, 0]
        hashed = self.code.decode(int(words[0]))
        return hashed if (self.code.encode(np.array([hashed], np.uint64))[0] == words).all() else None

    def copy(self, source: int, to: int) -> None:
        """One slot to another."""
        self.words[to] = self.words[source]

    def _places(self, slots: DeviceSlots, start: int, stop: int) -> tuple[Int32Array, np.ndarray]:
        positions = np.arange(start, stop)
        pages, offsets = np.divmod(positions, self.page_tokens)
        rows = np.asarray(slots)[pages]
        if (rows == HOLE).any():
            raise RuleError("slots", f"pool {self.name!r} has no slot to write tokens {start} to {stop} to: {rows}")
        return rows, offsets


@dataclass(slots=True)
class DeviceMemory:
    """All device pools of a cache, by name; `make` is the factory that `build_kv_cache` takes."""

    pools: dict[PoolName, PoolMemory] = field(default_factory=dict)

    def make(self, name: str, geometry: PoolGeometry, slots: int) -> ArrayDevicePool:
        """A pool of one uint64 per token and layer."""
        layers = len(geometry.layers)
        words = np.full((slots, layers, geometry.tokens_per_slot), GARBAGE, np.uint64)
        self.pools[name] = PoolMemory(name, words, code(name, layers))
        return ArrayDevicePool.from_arrays(name, geometry, slots, [[words[:, layer]] for layer in range(layers)])


Arrays: TypeAlias = Mapping[PoolName, Sequence[np.ndarray]]
"""By the pool whose slots they lie at, arrays whose first axis is the slot."""


def device_arrays(entries: Iterable[PoolEntry], memory: DeviceMemory) -> Arrays:
    """All device memory, derived pools and packed drafts included."""
    arrays: dict[PoolName, list[np.ndarray]] = {}
    for entry in entries:
        drafts = [f"{entry.name}.draft{index}" for index in range(len(entry.packed_draft_device_pools))]
        own = [memory.pools[name].words for name in (entry.name, *drafts)]
        arrays.setdefault(entry.derived_from or entry.name, []).extend(own)
    return arrays


def host_arrays(entries: Iterable[PoolEntry]) -> Arrays:
    """All host memory."""
    arrays: dict[PoolName, list[np.ndarray]] = {}
    for entry in entries:
        arrays.setdefault(entry.derived_from or entry.name, []).append(entry.host_pool.pages)
    return arrays


class Poison:
    """Fills slots with garbage as soon as they are free: whoever still reads them is found out."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._free = {pool: np.zeros(len(parts[0]), np.bool_) for pool, parts in arrays.items()}

    def spread(self, pool: PoolName, taken: Int32Array) -> None:
        """All slots of `pool` but those that are taken are free now."""
        free = np.ones(len(self._free[pool]), np.bool_)
        free[taken] = False
        fresh = free & ~self._free[pool]
        self._free[pool] = free
        if fresh.any():
            for array in self._arrays[pool]:
                array[fresh] = GARBAGE if array.itemsize == WORD_BYTES else GARBAGE & 0xFF
