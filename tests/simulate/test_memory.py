"""Slots hold words that tell their prefix; what is free holds garbage."""

import numpy as np
import pytest

from hicache.layout import PoolGeometry, TensorSpec
from hicache.simulate.broken import RuleError
from hicache.simulate.content import alphabet
from hicache.simulate.memory import GARBAGE, DeviceMemory, Poison
from hicache.units import HOLE, DeviceSlots, HostSlots

PAGE, LAYERS = 4, 2
LETTERS = alphabet(64)


def slots(*values: int) -> DeviceSlots:
    return DeviceSlots(np.array(values, np.int32))


@pytest.fixture
def device() -> DeviceMemory:
    made = DeviceMemory()
    made.make("kv", PoolGeometry.uniform(LAYERS, (TensorSpec("word", (), "uint64"),), PAGE), 8)
    return made


def test_what_is_written_at_positions_is_read_there(device):
    pool = device.pools["kv"]
    hashes = LETTERS.hashes(0, 0, list(range(10)))
    pool.write(slots(5, 2, 7), 0, hashes[:6])
    pool.write(slots(5, 2, 7), 6, hashes[6:])
    assert (pool.read(slots(5, 2, 7), 3, 10) == pool.code.encode(hashes)[3:]).all()
    assert (pool.words[2, :, 1] == pool.code.encode(hashes)[5]).all()


def test_the_cache_sees_the_same_bytes(device):
    geometry = PoolGeometry.uniform(LAYERS, (TensorSpec("word", (), "uint64"),), PAGE)
    other = DeviceMemory()
    cached = other.make("kv", geometry, 8)
    hashes = LETTERS.hashes(0, 0, [1, 2, 3, 4])
    other.pools["kv"].write(slots(3), 0, hashes)
    pages = np.zeros((1, geometry.slot_bytes), np.uint8)
    rows = HostSlots(np.zeros(1, np.int32))
    cached.backup(slots(3), pages, rows)
    for layer in range(LAYERS):
        cached.load_layer(slots(6), pages, rows, layer)
    assert (other.pools["kv"].words[6] == other.pools["kv"].words[3]).all()


def test_a_hole_is_neither_read_nor_written(device):
    pool = device.pools["kv"]
    with pytest.raises(RuleError, match="no slot for tokens"):
        pool.read(slots(HOLE, 2), 3, 6)
    with pytest.raises(RuleError, match="no slot to write"):
        pool.write(slots(1, HOLE), 2, LETTERS.hashes(0, 2, [1, 2, 3]))
    assert len(pool.read(slots(HOLE, 2), 4, 6)) == 2


def test_a_snapshot_tells_its_prefix_unless_it_is_garbage(device):
    device.make("state", PoolGeometry.uniform(LAYERS, (TensorSpec("word", (), "uint64"),), 1), 4)
    pool = device.pools["state"]
    assert pool.read_state(1) is None
    pool.write_state(1, 12345)
    pool.copy(1, 3)
    assert pool.read_state(3) == 12345


def test_slots_are_spoiled_once_when_they_become_free():
    words, page = np.zeros((4, 2), np.uint64), np.zeros((4, 3), np.uint8)
    poison = Poison({"kv": [words, page]})
    poison.spread("kv", np.array([1, 2], np.int32))
    assert (words[[0, 3]] == GARBAGE).all() and (page[[0, 3]] == 0xA5).all() and not words[1:3].any()
    words[0] = 7
    poison.spread("kv", np.array([2], np.int32))
    assert (words[1] == GARBAGE).all() and (words[0] == 7).all()
