import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicache.coverage import Checkpoint, Full, Window
from hicache.tree import Pin, RadixTree
from hicache.units import Tier
from tests.tree.trees import NAMESPACE, PAGE, lengths, look, put, slots, tokens, tree_of

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def evict(tree: RadixTree, pool: str, tier: Tier, count: int, drop_dirty: bool = True) -> list[int]:
    freed = tree.evict(pool, tier, count, drop_dirty=drop_dirty)
    tree.check()
    return [int(slot) for slot in freed.slots(pool, tier)]


def test_the_least_recently_used_leaf_goes_first_from_its_tail():
    tree = tree_of()
    put(tree, "sab", 0)
    put(tree, "scd", 10)
    tree.touch(look(tree, "sab"), 3)
    assert evict(tree, "kv", DEVICE, 1) == [12]
    assert evict(tree, "kv", DEVICE, 2) == [11, 2]
    assert evict(tree, "kv", DEVICE, 9) == [1, 0]
    assert tree.nodes == 0


def test_eviction_frees_no_more_than_asked_with_full_pools_only():
    tree = tree_of(Full(), Full())
    put(tree, "abcdefgh", 0)
    freed = tree.evict("a", DEVICE, 3, drop_dirty=True)
    assert freed.slots("a", DEVICE).tolist() == freed.slots("kv", DEVICE).tolist() == [5, 6, 7]


def test_a_prefix_is_cut_down_to_where_it_can_be_resumed():
    tree = tree_of(Full(), Checkpoint())
    put(tree, "abcdef", 0, only={"a": slots(None, 1, None, None, None, 5)})
    assert evict(tree, "kv", DEVICE, 1) == [2, 3, 4, 5]
    assert lengths(look(tree, "abcdef")) == (2, 2, 2)


def test_pages_nobody_can_resume_at_go_before_anything_else():
    tree = tree_of(Full(), Checkpoint())
    put(tree, "ab", 0)
    put(tree, "xyz", 10, only={"a": slots(10, None, None)})
    assert evict(tree, "kv", DEVICE, 1, drop_dirty=False) == [11, 12]
    assert tree.dirty("kv", 10)[0].stop == 2


def test_losing_a_checkpoint_makes_the_tail_behind_it_go_first():
    tree = tree_of(Full(), Checkpoint())
    put(tree, "abc", 0)
    put(tree, "xyz", 10, only={"a": slots(10, None, 12)})
    evict(tree, "a", DEVICE, 3)
    put(tree, "abc", 20)
    tree.evict("a", DEVICE, 2, drop_dirty=True)
    tree.check()
    assert lengths(look(tree, "xyz")) == (3, 0, 0)
    assert evict(tree, "kv", DEVICE, 1) == [10, 11, 12]


def test_an_anchors_last_copy_takes_its_sidecars_along():
    tree = tree_of(Full(), Window(99), Checkpoint())
    put(tree, "abc", 0)
    put(tree, "ab", 10, HOST)
    freed = tree.evict("kv", DEVICE, 1, drop_dirty=True)
    assert [freed.slots(name, DEVICE).tolist() for name in ("kv", "a", "b")] == [[2], [2], [2]]
    assert freed.count("kv", HOST) == 0
    freed = tree.evict("kv", DEVICE, 2, drop_dirty=True)
    assert freed.slots("kv", DEVICE).tolist() == [0, 1]
    assert freed.count("a", DEVICE) == 0
    freed = tree.evict("kv", HOST, 2, drop_dirty=True)
    assert sorted(freed.slots("a", DEVICE).tolist()) == [0, 1]
    assert sorted(freed.slots("a", HOST).tolist()) == [10, 11]
    assert tree.nodes == 0


def test_windows_go_head_first():
    tree = tree_of(Full(), Window(99))
    put(tree, "abcd", 0)
    assert evict(tree, "a", DEVICE, 1) == [0]
    assert evict(tree, "a", DEVICE, 2) == [1, 2]
    assert evict(tree, "kv", DEVICE, 1) == [0, 1, 2, 3]


def test_without_dropping_only_what_has_a_host_copy_goes():
    tree = tree_of()
    put(tree, "ab", 0)
    put(tree, "xy", 10)
    put(tree, "x", 20, HOST)
    assert evict(tree, "kv", DEVICE, 9, drop_dirty=False) == []
    put(tree, "xy", 20, HOST)
    assert evict(tree, "kv", DEVICE, 9, drop_dirty=False) == [10, 11]
    assert lengths(look(tree, "xy")) == (2, 0, 2)


def test_dirty_pages_come_in_the_order_of_eviction_until_they_are_pinned():
    tree = tree_of()
    put(tree, "sab", 0)
    put(tree, "scd", 10)
    first, second = tree.dirty("kv", 3)
    assert tree.slots(first, "kv", DEVICE, first.start, first.stop).tolist() == [1, 2]
    assert tree.slots(second, "kv", DEVICE, second.start, second.stop).tolist() == [12]
    receipt = tree.pin_span(first, Pin.HERE)
    assert [len(span) for span in tree.dirty("kv", 9)] == [2]
    assert tree.attach(first, HOST, {"kv": slots(1, 2)}) == {}
    tree.unpin(receipt)
    assert evict(tree, "kv", DEVICE, 9, drop_dirty=False) == [1, 2]


def test_dirty_pages_go_on_with_the_parent_once_all_below_it_are_listed():
    tree = tree_of()
    put(tree, "ab", 0)
    put(tree, "abcd", 2, first_page=2)
    spans = tree.dirty("kv", 9)
    assert [(span.start, span.stop) for span in spans] == [(2, 4), (0, 2)]
    tree.check()


def test_a_host_page_goes_only_when_nothing_deeper_is_left():
    tree = tree_of()
    put(tree, "ab", 0)
    put(tree, "ab", 0, HOST)
    tree.evict("kv", DEVICE, 9, drop_dirty=False)
    put(tree, "abcd", 2, first_page=2)
    assert tree.evictable("kv", HOST) == 0
    assert evict(tree, "kv", HOST, 9) == []
    tree.evict("kv", DEVICE, 9, drop_dirty=True)
    assert evict(tree, "kv", HOST, 9) == [0, 1]


def test_dropping_a_device_page_takes_what_lies_deeper_on_the_host():
    tree = tree_of()
    put(tree, "ab", 0)
    put(tree, "abcd", 2, first_page=2)
    put(tree, "abcd", 12, HOST, first_page=2)
    assert evict(tree, "kv", DEVICE, 2, drop_dirty=False) == [2, 3]
    freed = tree.evict("kv", DEVICE, 1, drop_dirty=True)
    tree.check()
    assert freed.slots("kv", DEVICE).tolist() == [1]
    assert freed.slots("kv", HOST).tolist() == [12, 13]


def test_host_duplicates_go_first_or_last_as_the_tree_was_told():
    for first in (True, False):
        tree = tree_of(host_duplicates_first=first)
        put(tree, "ab", 0, HOST)
        put(tree, "xy", 10)
        put(tree, "xy", 10, HOST)
        assert evict(tree, "kv", HOST, 2) == ([10, 11] if first else [0, 1])


def test_a_tree_without_full_pools_evicts_by_age():
    tree = tree_of(Checkpoint(), Window(99))
    put(tree, "abc", 0)
    put(tree, "xyz", 10)
    assert evict(tree, "kv", DEVICE, 4) == [0, 1, 2, 10]
    assert evict(tree, "a", DEVICE, 9) == [0, 1, 2, 10, 11, 12]
    evict(tree, "kv", DEVICE, 9)
    assert tree.nodes == 0


def test_a_narrower_sidecar_of_a_windowed_anchor_goes_along_and_a_wider_pool_stays():
    tree = tree_of(Window(2 * PAGE + 1), Checkpoint(), Window(9 * PAGE))
    put(tree, "abcd", 0)
    freed = tree.evict("kv", DEVICE, 2, drop_dirty=True)
    tree.check()
    assert freed.slots("a", DEVICE).tolist() == [0, 1]
    assert freed.count("b", DEVICE) == 0


def test_a_queue_does_not_grow_with_the_evictions_of_a_long_life():
    tree = tree_of()
    for number in range(6000):
        tree.insert(NAMESPACE, tokens("s") + np.full(PAGE, number, np.uint32).tobytes(), 0, {"kv": slots(0, number)})
        tree.insert(NAMESPACE, tokens("s"), 0, {"kv": slots(0)}, HOST)
        if number > 3:
            tree.evict("kv", DEVICE, 1, drop_dirty=True)
            tree.evict("kv", HOST, 1, drop_dirty=True)
    assert all(len(heap) < 3000 for heap in tree._core.accounts.shared.queues.heaps)
    tree.check()


def test_the_order_follows_the_policy():
    class MostUsedFirst:
        name = "most-used-first"
        keys_fall = True

        def key(self, node):
            return -node.hits

    tree = RadixTree(PAGE, tree_of().pools, policy=MostUsedFirst())
    put(tree, "ab", 0)
    put(tree, "xy", 10)
    for _ in range(2):
        tree.touch(look(tree, "xy"), 2)
    assert evict(tree, "kv", DEVICE, 2) == [10, 11]


@given(
    calls=st.lists(st.tuples(st.sampled_from("iite"), st.text("abc", min_size=1, max_size=6)), min_size=5, max_size=60)
)
def test_each_page_evicted_is_the_oldest_leaf(calls: list[tuple[str, str]]):
    tree = tree_of()
    used: dict[str, int] = {}
    slot_of: dict[str, int] = {}
    for now, (call, prompt) in enumerate(calls):
        if call == "i" and not any(page.startswith(prompt) for page in used):
            runs = np.arange(100 * now, 100 * now + len(prompt), dtype=np.int32)
            tree.insert(NAMESPACE, tokens(prompt), 0, {"kv": runs})
            for stop in range(1, len(prompt) + 1):
                slot_of.setdefault(prompt[:stop], 100 * now + stop - 1)
                used[prompt[:stop]] = now
        elif call == "t":
            match = look(tree, prompt)
            tree.unpin(tree.pin(match, Pin.SOMEWHERE, match.pages))
            tree.touch(match, match.pages)
            used.update({prompt[:stop]: now for stop in range(1, match.pages + 1)})
        elif call == "e" and used:
            leaves = [page for page in used if not any(other.startswith(page) and other != page for other in used)]
            oldest = min(leaves, key=lambda page: used[page])
            assert evict(tree, "kv", DEVICE, 1) == [slot_of.pop(oldest)]
            del used[oldest]
