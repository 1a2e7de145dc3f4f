"""What an engine gets to see is registered memory, and holds the bytes that were given or asked for."""

import ctypes
import itertools

import numpy as np
import pytest

from hicache.storage.registered import RegisteredMemory


class Ledger:
    """Stands for an engine: knows what is registered, and reads and writes nothing else."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.memory = RegisteredMemory(self.known.__setitem__, self.known.__delitem__)

    def require(self, address: int, nbytes: int) -> None:
        assert any(start <= address and address + nbytes <= start + size for start, size in self.known.items())

    def get(self, address: int, nbytes: int) -> bytes:
        self.require(address, nbytes)
        return ctypes.string_at(address, nbytes)

    def put(self, address: int, data: bytes) -> None:
        self.require(address, len(data))
        ctypes.memmove(address, data, len(data))


@pytest.mark.parametrize("sizes", [[3], [256, 5000], [0, 7, 0], [6 << 20], []])
@pytest.mark.parametrize("registered", [True, False])
def test_bytes_go_both_ways(sizes: list[int], registered: bool):
    ledger = Ledger()
    arena = np.random.default_rng(0).integers(0, 256, sum(sizes) + 10, dtype=np.uint8)
    if registered:
        ledger.memory.add([arena.data])
        ledger.memory.add([arena.data])
    bounds = np.cumsum([5, *sizes])
    parts = [arena.data[a:b] for a, b in itertools.pairwise(bounds)]
    given = arena.tobytes()
    with ledger.memory.lend([parts, [memoryview(b"header")]]) as [one, header]:
        one.take_in()
        header.take_in()
        places = list(zip(one.addresses, one.sizes, strict=True))
        assert b"".join(ledger.get(*place) for place in places) == given[5:-5]
        assert ledger.get(header.addresses[0], header.sizes[0]) == b"header"
        assert one.nbytes == sum(sizes)
        if registered:
            assert not one.copies
        for address, nbytes in places:
            ledger.put(address, b"w" * nbytes)
        one.hand_out()
    assert arena.tobytes() == given[:5] + b"w" * sum(sizes) + given[-5:]
    ledger.memory.clear()
    assert not ledger.known


def test_blocks_are_kept_but_not_many_nor_large_ones():
    ledger = Ledger()
    for _ in range(3):
        with ledger.memory.lend([[memoryview(b"x")]]):
            assert len(ledger.known) == 1
    with ledger.memory.lend([[memoryview(bytearray(9 << 20))]]):
        assert sorted(ledger.known.values()) == [4 << 20, 9 << 20]
    assert list(ledger.known.values()) == [4 << 20]
