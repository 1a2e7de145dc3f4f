import pytest

from hicache.coverage import Checkpoint, Full, Window
from hicache.errors import InvariantError
from hicache.tree import Pin, RadixTree
from hicache.units import Tier
from tests.tree.trees import PAGE, lengths, look, put, slots, tree_of

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def evict_all(tree: RadixTree, pool: str, tier: Tier) -> list[int]:
    freed = tree.evict(pool, tier, 1_000_000, drop_dirty=True)
    tree.check()
    return sorted(freed.slots(pool, tier).tolist())


def test_a_pinned_prefix_stays_and_what_is_behind_it_goes():
    tree = tree_of()
    put(tree, "abcdef", 0)
    receipt = tree.pin(look(tree, "abcdef"), Pin.HERE, 4)
    assert tree.evictable("kv", DEVICE) == 2
    assert evict_all(tree, "kv", DEVICE) == [4, 5]
    tree.unpin(receipt)
    assert tree.evictable("kv", DEVICE) == 4
    assert evict_all(tree, "kv", DEVICE) == [0, 1, 2, 3]


def test_a_pin_outlives_splits_of_its_nodes():
    tree = tree_of(Full(), Window(2 * PAGE + 1))
    put(tree, "abcdef", 0)
    receipt = tree.pin(look(tree, "abcdef"), Pin.HERE, 6)
    put(tree, "abxy", 10)
    put(tree, "abcx", 20)
    tree.check()
    evict_all(tree, "a", DEVICE)
    evict_all(tree, "kv", DEVICE)
    match = look(tree, "abcdef")
    assert lengths(match) == (6, 6, 6)
    tree.unpin(receipt)
    tree.check()
    assert tree.evictable("kv", DEVICE) == 6


def test_a_pin_is_given_back_once():
    tree = tree_of()
    put(tree, "ab", 0)
    receipt = tree.pin(look(tree, "ab"), Pin.HERE, 2)
    tree.unpin(receipt)
    with pytest.raises(InvariantError, match="was given back before"):
        tree.unpin(receipt)


def test_two_pins_of_one_page_need_two_givings_back():
    tree = tree_of()
    put(tree, "abcd", 0)
    first = tree.pin(look(tree, "abcd"), Pin.HERE, 4)
    second = tree.pin(look(tree, "abcd"), Pin.HERE, 2)
    tree.unpin(first)
    assert tree.evictable("kv", DEVICE) == 2
    tree.unpin(second)
    assert tree.evictable("kv", DEVICE) == 4


def test_only_what_coverage_needs_is_pinned():
    tree = tree_of(Full(), Window(2 * PAGE + 1), Checkpoint())
    put(tree, "abcdef", 0)
    receipt = tree.pin(look(tree, "abcdef"), Pin.HERE, 5)
    assert evict_all(tree, "a", DEVICE) == [0, 1, 2, 5]
    assert evict_all(tree, "b", DEVICE) == [0, 1, 2, 3, 5]
    assert lengths(look(tree, "abcdef"))[1] == 5
    tree.unpin(receipt)


def test_a_transfer_pins_each_pool_from_a_page_of_its_own():
    tree = tree_of(Full(), Window(2 * PAGE + 1), Checkpoint())
    put(tree, "abcdef", 0)
    put(tree, "abcdef", 10, HOST)
    nodes = tree.nodes
    span = tree.span(look(tree, "abcdef"), 0, 6)
    receipt = tree.pin_from(span, Pin.HOST, {"kv": 0, "b": 5})
    assert tree.nodes == nodes, "the last page alone is pinned without a node of its own"
    tree.unpin(receipt)
    receipt = tree.pin_from(span, Pin.HOST, {"kv": 2, "a": 4, "b": 5})
    tree.check()
    assert [tree.evictable(pool, HOST) for pool in ("kv", "a", "b")] == [2, 4, 5]
    assert evict_all(tree, "a", HOST) == [10, 11, 12, 13]
    assert evict_all(tree, "b", HOST) == [10, 11, 12, 13, 14]
    assert evict_all(tree, "kv", HOST) == [10, 11]
    tree.unpin(receipt)
    assert tree.pins_total() == 0
    assert [tree.evictable(pool, HOST) for pool in ("kv", "a", "b")] == [4, 2, 1]
    tree.unpin(tree.pin_from(tree.span(look(tree, "abcdef"), 0, 0), Pin.HOST, {"kv": 0}))
    tree.check()


def test_a_windows_pins_go_back_as_it_passes_them():
    tree = tree_of(Full(), Window(4 * PAGE + 1))
    for stop in range(1, 7):
        put(tree, "abcdef"[:stop], stop - 1, first_page=stop - 1)
    receipt = tree.pin(look(tree, "abcdef"), Pin.HERE, 6)
    assert tree.evictable("a", DEVICE) == 2
    receipt = tree.unpin_before(receipt, "a", 4)
    tree.check()
    assert tree.evictable("a", DEVICE) == 4
    assert tree.evictable("kv", DEVICE) == 0
    receipt = tree.unpin_before(receipt, "a", 6)
    assert tree.evictable("a", DEVICE) == 6
    assert tree.pins_total() == 1
    tree.unpin(receipt)
    assert tree.pins_total() == 0
    tree.check()


def test_a_full_pools_part_is_not_given_back_alone():
    tree = tree_of(Full(), Window(9))
    put(tree, "ab", 0)
    receipt = tree.pin(look(tree, "ab"), Pin.HERE, 2)
    with pytest.raises(InvariantError, match="needs all its pages"):
        tree.unpin_before(receipt, "kv", 1)
    tree.unpin(receipt)


def test_somewhere_lets_one_copy_go_and_keeps_the_last():
    tree = tree_of()
    put(tree, "abcd", 0)
    put(tree, "abcd", 10, HOST)
    receipt = tree.pin(look(tree, "abcd"), Pin.SOMEWHERE, 4)
    assert evict_all(tree, "kv", DEVICE) == [0, 1, 2, 3]
    assert evict_all(tree, "kv", HOST) == []
    tree.unpin(receipt)
    assert evict_all(tree, "kv", HOST) == [10, 11, 12, 13]


def test_somewhere_keeps_the_device_copy_when_the_host_copy_goes():
    tree = tree_of(Full(), Checkpoint())
    put(tree, "abcd", 0)
    put(tree, "abcd", 10, HOST)
    receipt = tree.pin(look(tree, "abcd"), Pin.SOMEWHERE, 4)
    assert evict_all(tree, "kv", HOST) == [10, 11, 12, 13]
    assert evict_all(tree, "kv", DEVICE) == []
    assert evict_all(tree, "a", HOST) == [10, 11, 12, 13]
    assert evict_all(tree, "a", DEVICE) == [0, 1, 2]
    tree.unpin(receipt)
    assert tree.evictable("kv", DEVICE) == 4


def test_a_host_pin_keeps_the_host_copy_and_not_the_device_copy():
    tree = tree_of()
    put(tree, "abcd", 0)
    put(tree, "abcd", 10, HOST)
    receipt = tree.pin_span(tree.span(look(tree, "abcd"), 1, 3), Pin.HOST)
    assert evict_all(tree, "kv", HOST) == [10, 13]
    assert evict_all(tree, "kv", DEVICE) == [1, 2, 3]
    tree.unpin(receipt)


def test_a_sidecars_pin_keeps_the_anchors_last_copy_with_it():
    tree = tree_of(Full(), Window(9))
    put(tree, "abcd", 0)
    receipt = tree.pin_span(tree.span(look(tree, "abcd"), 1, 2), Pin.HERE, ["a"])
    assert evict_all(tree, "kv", DEVICE) == [2, 3]
    assert 1 in tree.resident("a", DEVICE)
    tree.unpin(receipt)


def test_bad_data_leaves_even_if_pinned_and_the_pin_still_comes_back():
    tree = tree_of(Full(), Checkpoint())
    match = put(tree, "abcd", 0)
    receipt = tree.pin(match, Pin.HERE, 4)
    tree.detach(tree.span(match, 0, 4), DEVICE, ["kv"])
    tree.check()
    assert lengths(look(tree, "abcd"))[1] == 0
    tree.unpin(receipt)
    tree.check()
    evict_all(tree, "a", DEVICE)
    assert tree.nodes == 0


def test_an_empty_pin_is_a_pin_too():
    tree = tree_of()
    put(tree, "ab", 0)
    receipt = tree.pin(look(tree, "ab"), Pin.HERE, 0)
    assert tree.pins_total() == 1
    tree.unpin(receipt)
    with pytest.raises(InvariantError, match="can't pin 3 pages"):
        tree.pin(look(tree, "ab"), Pin.HERE, 3)


def test_a_load_pins_both_ends():
    tree = tree_of()
    put(tree, "ab", 0)
    put(tree, "abcd", 10, HOST)
    match = look(tree, "abcd")
    here = tree.pin(match, Pin.HERE, match.device_pages)
    source = tree.pin_span(tree.span(match, match.device_pages, match.usable_pages), Pin.HOST)
    evict_all(tree, "kv", DEVICE)
    assert evict_all(tree, "kv", HOST) == [10, 11]
    assert tree.attach(source_span(tree), DEVICE, {"kv": slots(2, 3)}) == {}
    tree.unpin(source)
    tree.unpin(here)
    assert lengths(look(tree, "abcd")) == (4, 4, 4)
    tree.check()


def source_span(tree: RadixTree):
    return tree.span(look(tree, "abcd"), 2, 4)
