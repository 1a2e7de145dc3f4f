"""A slot allocator against a plain set: whole or nothing, no slot twice, and a wrong free changes nothing."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache.errors import InvariantError
from hicache.pools import SlotAllocator
from hicache.units import Int32Array

SIZE = 40
RESERVED = 2


def slots(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


class SlotMachine(RuleBasedStateMachine):
    """The allocator beside a set of held slots; runs both above and below the size where numpy takes over."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(SIZE, RESERVED)
        self.held: set[int] = set()

    @rule(count=st.integers(0, SIZE))
    def alloc(self, count: int) -> None:
        given_out = self.allocator.alloc(count)
        if count > SIZE - RESERVED - len(self.held):
            assert given_out is None
            return
        assert given_out is not None and given_out.dtype == np.int32
        numbers = given_out.tolist()
        assert numbers == sorted(set(numbers)) and len(numbers) == count
        assert all(RESERVED <= slot < SIZE and slot not in self.held for slot in numbers)
        self.held |= set(numbers)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(sorted(self.held)))
        gone = order[: data.draw(st.integers(1, len(order)))]
        self.allocator.free(slots(*gone))
        self.held -= set(gone)

    @rule(data=st.data())
    def wrong_free(self, data: st.DataObject) -> None:
        good = data.draw(st.permutations(sorted(self.held)))[: data.draw(st.integers(0, SIZE))]
        free = sorted(set(range(-2, SIZE + 2)) - self.held)
        bad = data.draw(st.sampled_from(free + list(good)))
        named = [*good, bad]
        with pytest.raises(InvariantError):
            self.allocator.free(slots(*data.draw(st.permutations(named))))

    @invariant()
    def nothing_lost(self) -> None:
        self.allocator.check()
        assert self.allocator.available == SIZE - RESERVED - len(self.held)
        assert self.allocator.taken().tolist() == sorted(self.held)


TestSlotMachine = SlotMachine.TestCase


@given(st.lists(st.integers(1, 40), max_size=6))
def test_a_fresh_pool_gives_contiguous_ascending_runs(counts: Sequence[int]) -> None:
    allocator = SlotAllocator(300)
    given_out = [allocator.alloc(count) for count in counts]
    everything = [slot for run in given_out if run is not None for slot in run.tolist()]
    assert everything == list(range(sum(counts)))


def test_a_freed_run_becomes_contiguous_again_whatever_the_order_of_frees() -> None:
    allocator = SlotAllocator(64)
    held = allocator.alloc(64)
    assert held is not None
    for slot in np.random.default_rng(0).permutation(held):
        allocator.free(slots(slot))
    again = allocator.alloc(64)
    assert again is not None
    assert again.tolist() == list(range(64))


@pytest.mark.parametrize("reserved", [-1, 5])
def test_more_reserved_slots_than_there_are_is_a_bug(reserved: int) -> None:
    with pytest.raises(InvariantError, match="reserve"):
        SlotAllocator(4, reserved)


def test_a_negative_count_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="-1"):
        SlotAllocator(4).alloc(-1)


def test_the_auditor_sees_a_slot_with_two_owners_and_one_with_none() -> None:
    lost = SlotAllocator(4)
    lost.alloc(2)
    lost._flags[1] = 0
    with pytest.raises(InvariantError, match="no owner or two: 1"):
        lost.check()
    shared = SlotAllocator(4)
    shared._flags[3] = 1
    with pytest.raises(InvariantError, match="no owner or two: 3"):
        shared.check()
