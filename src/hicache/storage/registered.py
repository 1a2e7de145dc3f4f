"""An engine sees registered memory only: host arenas as they are, everything else through a registered block."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from hicache.storage.protocol import Buffers
from hicache.units import ByteArray

_BLOCK_BYTES = 4 << 20
_KEPT_BLOCKS = 4


@dataclass(slots=True)
class Lent:
    """One value as addresses and sizes, in order. `copies`: what lies in a block instead of its own place."""

    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    copies: list[tuple[memoryview, ByteArray]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return sum(self.sizes)

    def take_in(self) -> None:
        """Copies what the engine is to read into the block."""
        for part, place in self.copies:
            place[:] = np.frombuffer(part, np.uint8)

    def hand_out(self) -> None:
        """Copies what the engine has written out of the block."""
        for part, place in self.copies:
            part[:] = place.data


class RegisteredMemory:
    """Memory that an engine was told of. `register` and `unregister` get an address and a size. Thread-safe."""

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        self._register = register
        self._unregister = unregister
        self._lock = threading.Lock()
        self._arenas: list[tuple[int, int]] = []
        self._blocks: list[ByteArray] = []

    def add(self, arenas: Sequence[memoryview]) -> None:
        """Registers arenas; those that are registered already stay so."""
        for arena in arenas:
            start = _address(arena)
            with self._lock:
                if arena.nbytes and (start, start + arena.nbytes) not in self._arenas:
                    self._register(start, arena.nbytes)
                    self._arenas.append((start, start + arena.nbytes))

    def clear(self) -> None:
        """Takes everything back from the engine."""
        with self._lock:
            for start, _ in self._arenas:
                self._unregister(start)
            for block in self._blocks:
                self._unregister(block.ctypes.data)
            self._arenas, self._blocks = [], []

    @contextmanager
    def lend(self, values: Sequence[Buffers]) -> Iterator[list[Lent]]:
        """Each value as registered memory, until the block ends."""
        parts = [[part.cast("B") for part in value if part.nbytes] for value in values]
        loose = sum(part.nbytes for value in parts for part in value if not self._holds(part))
        block = self._take_block(loose)
        try:
            yield self._place(parts, block)
        finally:
            self._give_block(block)

    def _place(self, values: Sequence[Sequence[memoryview]], block: ByteArray) -> list[Lent]:
        used, placed = 0, []
        for value in values:
            lent = Lent()
            for part in value:
                address = _address(part)
                if not self._holds(part):
                    place = block[used : used + part.nbytes]
                    address = place.ctypes.data
                    lent.copies.append((part, place))
                    used += part.nbytes
                lent.addresses.append(address)
                lent.sizes.append(part.nbytes)
            placed.append(lent)
        return placed

    def _holds(self, part: memoryview) -> bool:
        start = _address(part)
        return any(first <= start and start + part.nbytes <= last for first, last in self._arenas)

    def _take_block(self, nbytes: int) -> ByteArray:
        with self._lock:
            if nbytes <= _BLOCK_BYTES and self._blocks:
                return self._blocks.pop()
        block = np.empty(max(nbytes, _BLOCK_BYTES), np.uint8)
        self._register(block.ctypes.data, block.nbytes)
        return block

    def _give_block(self, block: ByteArray) -> None:
        with self._lock:
            if block.nbytes == _BLOCK_BYTES and len(self._blocks) < _KEPT_BLOCKS:
                self._blocks.append(block)
                return
        self._unregister(block.ctypes.data)


def _address(part: memoryview) -> int:
    return int(np.frombuffer(part, np.uint8).ctypes.data)
