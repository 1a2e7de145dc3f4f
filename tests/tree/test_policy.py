"""Each policy against a slow twin that looks at everything, and what it is for, on small trees."""

import random
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.config import CacheConfig
from hicache.coverage import Checkpoint, Full
from hicache.errors import ConfigError
from hicache.tree import NO_WISH, POLICIES, EvictionPolicy, Pin, RadixTree, Wish
from hicache.tree.policies import CostAware, S3Fifo, Slru
from hicache.tree.priority import Priority
from hicache.tree.view import View
from hicache.units import Tier
from tests.tree.trees import NAMESPACE, PAGE, look, put, slots, tokens, tree_of
from tests.tree.twins import CostTwin, FifoTwin, LfuTwin, LruTwin, PriorityTwin, S3FifoTwin, SlruTwin

DEVICE, HOST = Tier.DEVICE, Tier.HOST
PAGES = range(8)


def test_settings_name_the_policies_that_there_are():
    assert get_args(CacheConfig.model_fields["eviction_policy"].annotation) == tuple(POLICIES)
    assert [make().name for make in POLICIES.values()] == list(POLICIES)


@pytest.mark.parametrize("make", [Slru, S3Fifo, Priority])
@pytest.mark.parametrize("share", [0, 1, -0.5, float("nan")])
def test_a_share_is_part_of_the_pool(make, share):
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        make(share)


# Flat: every prompt is one page, so that textbook caches can be compared


def page_tokens(page: int) -> bytes:
    return np.full(PAGE, page, np.uint32).tobytes()


class Shelf:
    """A tree of single pages, each a number and in the slot of that number, that never holds more than it may."""

    def __init__(self, policy: EvictionPolicy, room: int, *, check: bool = True) -> None:
        self.check = check
        self.tree = tree_of(policy=policy, device_slots=room)
        self.room = room
        self.held: list[int] = []

    def use(self, page: int, wish: Wish = NO_WISH) -> int | None:
        """Uses a page, or puts it in. Returns the page that had to go."""
        match = self.tree.match(NAMESPACE, page_tokens(page))
        if match.pages:
            self.tree.touch(match, 1, wish)
            return None
        gone = None
        if len(self.held) == self.room:
            freed = self.tree.evict("kv", DEVICE, 1, drop_dirty=True).slots("kv", DEVICE)
            if self.check:
                self.tree.check()
            (gone,) = freed.tolist()
            self.held.remove(gone)
        self.tree.insert(NAMESPACE, page_tokens(page), 0, {"kv": slots(page)}, wish=wish)
        self.held.append(page)
        return gone


TWINS: dict[str, tuple[Callable[[], EvictionPolicy], type[LruTwin]]] = {
    "lru": (POLICIES["lru"], LruTwin),
    "fifo": (POLICIES["fifo"], FifoTwin),
    "lfu": (POLICIES["lfu"], LfuTwin),
    "slru": (lambda: Slru(0.5), SlruTwin),
    "s3-fifo": (lambda: S3Fifo(0.4), S3FifoTwin),
    "cost-aware": (lambda: CostAware(100), CostTwin),
}


@pytest.mark.parametrize("name", TWINS)
@given(pages=st.lists(st.sampled_from(PAGES), min_size=10, max_size=80), room=st.integers(1, 6))
def test_what_goes_is_what_the_textbook_says(name: str, pages: list[int], room: int):
    make, twin_of = TWINS[name]
    shelf, twin = Shelf(make(), room), twin_of(room)
    for page in pages:
        assert shelf.use(page) == twin.use(page)


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(PAGES),
            st.sampled_from([0, 0, 0, 1, 2, 2, -1]),
            st.sampled_from([None, None, 3.0, 10.0]),
            st.sampled_from([0.0, 0.0, 0.0, 2.0]),
        ),
        min_size=10,
        max_size=80,
    ),
    room=st.integers(1, 6),
)
def test_priorities_go_as_a_look_at_all_pages_says(calls, room: int):
    shelf, twin = Shelf(Priority(), room), PriorityTwin(room)
    for page, priority, ttl_s, later_s in calls:
        twin.now_s += later_s
        shelf.tree.advance(1000.0 + twin.now_s)
        twin.wish = Wish(priority, ttl_s)
        assert shelf.use(page, twin.wish) == twin.use(page)


# Trees: whatever the key, the lowest of the leaves goes

CALLS = st.lists(
    st.tuples(
        st.sampled_from("iitteph"),
        st.text("ab", min_size=1, max_size=6),
        st.sampled_from([NO_WISH, Wish(1), Wish(2, 3.0), Wish(-1)]),
    ),
    min_size=5,
    max_size=60,
)


def lowest_leaf(tree: RadixTree) -> int:
    """The last slot of the leaf with the lowest key, as all keys are now."""
    core = tree._core
    leaves = [node for node in core.walk() if not node.children]
    first = min(leaves, key=lambda node: (core.policy.key(node), node.start, node.tick))
    return int.from_bytes(first.device[0][-4:], "little")


def bounded_pages(tree: RadixTree) -> int:
    """Pages of the nodes that stay longer because of a bounded share."""
    core: Any = tree._core
    if core.policy.name not in ("slru", "s3-fifo", "priority"):
        return 0
    return sum([core.size(node) for node in core.walk() if core.policy.key(node) >= (1, 0)])


@pytest.mark.parametrize("name", POLICIES)
@given(calls=CALLS)
def test_the_leaf_with_the_lowest_key_goes(name: str, calls):
    tree = tree_of(policy=POLICIES[name](), device_slots=10)
    most = {"slru": 8, "s3-fifo": 9, "priority": 5}.get(name, 0)
    for now, (call, prompt, wish) in enumerate(calls):
        tree.advance(now / 4)
        match = look(tree, prompt)
        if call == "i":
            runs = {"kv": slots(*range(100 * now, 100 * now + len(prompt)))}
            tree.insert(NAMESPACE, tokens(prompt), 0, runs, wish=wish)
        elif call == "t":
            tree.unpin(tree.pin(match, Pin.SOMEWHERE, match.pages))
            tree.touch(match, match.pages, wish)
        elif call == "h":
            tree.unpin(tree.pin(match, Pin.HERE, match.pages // 2))
            tree.touch(look(tree, prompt), match.pages // 2, wish)
        elif tree.nodes:
            expected = lowest_leaf(tree)
            freed = tree.evict("kv", DEVICE, 1, drop_dirty=True)
            assert freed.slots("kv", DEVICE).tolist() == [expected]
        assert bounded_pages(tree) <= most
        tree.check()


def test_a_request_counts_one_hit_for_every_page_of_its_prefix():
    tree = tree_of()
    put(tree, "abcd", 0)
    tree.touch(look(tree, "abcd"), 4)
    match = look(tree, "abcd", 2)
    tree.unpin(tree.pin(match, Pin.HERE, 2))
    tree.touch(look(tree, "ab"), 2)
    tree.touch(look(tree, "abxx"), 2)
    assert {node.key[:1]: node.hits for node in tree._core.walk()} == {b"a": 3, b"c": 1}
    span = tree.span(look(tree, "abcd"), 0, 4)
    assert [tree.often_used(span, hits) for hits in (0, 1, 2, 3, 4)] == [4, 4, 2, 2, 0]
    assert tree.often_used(tree.span(look(tree, "abcd"), 0, 1), 3) == 1


# What they are for


def hit_share(policy: EvictionPolicy) -> float:
    """The share of uses that hit, where half are of 30 pages, some often, and half are scanned once each."""
    dice = random.Random(5)
    shelf = Shelf(policy, 40, check=False)
    hits = 0
    for number in range(4000):
        page = min(int(dice.expovariate(0.1)), 29) if number % 80 < 40 else 1000 + number
        hits += page in shelf.held
        shelf.use(page)
    return hits / 2000


def test_a_scan_does_not_drive_out_what_is_used_again():
    lru = hit_share(POLICIES["lru"]())
    assert lru < 0.72
    assert hit_share(POLICIES["slru"]()) > lru + 0.2
    assert hit_share(POLICIES["s3-fifo"]()) > lru + 0.2


def victims(tree: RadixTree, count: int) -> list[int]:
    return [int(slot) for slot in tree.evict("kv", DEVICE, count, drop_dirty=True).slots("kv", DEVICE)]


def prioritised(policy: EvictionPolicy, device_slots: int | None = None, **wishes: Wish) -> RadixTree:
    """A tree of single pages, each with a wish, in order; slots count from 0."""
    tree = tree_of(policy=policy, device_slots=device_slots)
    for number, (page, wish) in enumerate(wishes.items()):
        tree.insert(NAMESPACE, tokens(page), 0, {"kv": slots(number)}, wish=wish)
    return tree


def test_a_higher_priority_stays_longer():
    tree = prioritised(Priority(), a=Wish(2), b=Wish(0), c=Wish(-1), d=Wish(1))
    assert victims(tree, 4) == [2, 1, 3, 0]


def test_what_has_expired_goes_first_and_a_hit_starts_its_time_anew():
    tree = prioritised(Priority(), a=NO_WISH, b=Wish(5, 10.0), c=Wish(5, 10.0))
    tree.advance(77.0)
    tree.advance(83.0)
    tree.touch(look(tree, "b"), 1)
    tree.advance(86.9)
    assert victims(tree, 1) == [0]
    tree.advance(87.0)
    assert victims(tree, 1) == [2]
    put(tree, "x", 7)
    tree.advance(92.9)
    assert victims(tree, 1) == [7]
    tree.advance(93.0)
    put(tree, "y", 8)
    assert victims(tree, 1) == [1]


def test_a_hit_after_the_end_makes_a_page_what_that_request_asks_for():
    tree = prioritised(Priority(), a=Wish(5, 10.0), b=NO_WISH)
    tree.advance(0.0)
    tree.advance(10.0)
    tree.touch(look(tree, "a"), 1)
    assert victims(tree, 2) == [1, 0]


def test_priorities_beyond_their_share_count_as_none_the_lowest_first():
    tree = prioritised(Priority(0.5), 6, a=Wish(1), b=Wish(3), c=Wish(2), d=Wish(2), e=NO_WISH)
    assert victims(tree, 5) == [0, 4, 2, 3, 1]


def test_a_page_over_the_share_is_back_once_it_is_used_again():
    tree = prioritised(Priority(0.5), 4, a=Wish(1), b=Wish(1), c=Wish(1), d=NO_WISH)
    tree.touch(look(tree, "a"), 1)
    assert victims(tree, 4) == [1, 3, 2, 0]


def test_a_request_gives_its_priority_to_its_whole_prefix_and_parts_keep_it():
    tree = tree_of(policy=Priority(), device_slots=20)
    put(tree, "xy", 10)
    tree.insert(NAMESPACE, tokens("abcd"), 0, {"kv": slots(0, 1, 2, 3)}, wish=Wish(1))
    put(tree, "abz", 20)
    put(tree, "uv", 30)
    assert victims(tree, 7) == [10, 11, 22, 30, 31, 2, 3]


def test_what_costs_more_to_compute_again_stays_longer():
    tree = tree_of(policy=CostAware(8))
    put(tree, "abcdefgh", 0)
    put(tree, "xy", 10)
    assert victims(tree, 3) == [10, 11, 7]


def test_a_snapshot_far_from_the_one_before_stays_longer():
    def order(policy: EvictionPolicy) -> list[int]:
        tree = tree_of(Full(), Checkpoint(), policy=policy)
        put(tree, "abcdefgh", 0, only={"a": slots(*[None] * 7, 1)})
        for number, more in enumerate("uvwx", 2):
            run = slots(*[None] * 8, number)
            put(tree, "abcdefgh" + more, 10 * number, only={"a": run})
        return [int(slot) for slot in tree.evict("a", DEVICE, 5, drop_dirty=True).slots("a", DEVICE)]

    assert order(POLICIES["lru"]())[0] == 1
    assert order(CostAware())[-1] == 1


def test_an_order_holds_in_every_tier():
    tree = tree_of(policy=Priority(), device_slots=10)
    for number, page in enumerate("abc"):
        put(tree, page, number)
        put(tree, page, 10 + number, HOST)
    tree.touch(look(tree, "a"), 1, Wish(1))
    assert victims(tree, 3) == [1, 2, 0]
    assert tree.evict("kv", HOST, 3, drop_dirty=True).slots("kv", HOST).tolist() == [11, 12, 10]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_forgets_what_left_the_tree(name: str):
    policy = POLICIES[name]()
    shelf = Shelf(policy, 4, check=False)
    for number in range(3000):
        shelf.tree.advance(float(number))
        for _ in range(4):
            shelf.use(number, Wish(1, 1e6))
    tree = shelf.tree
    sizes = [len(book) for book in vars(policy).values() if hasattr(book, "__len__")]
    assert all(size < 1200 for size in sizes), sizes
    assert all(len(heap) < 3000 for heap in tree._core.accounts.shared.queues.heaps)
    tree.check()


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_can_start_again_with_another_tree(name: str):
    policy = POLICIES[name]()
    first = tree_of(policy=policy, device_slots=4)
    put(first, "ab", 0)
    first.touch(look(first, "ab"), 2, Wish(3))
    second = tree_of(policy=policy, device_slots=4)
    put(second, "xy", 10)
    assert bounded_pages(second) == 0
    assert victims(second, 2) == [10, 11]


# Nodes that are split or lose pages


def cut(tree: RadixTree, prompt: str, pages: int) -> None:
    """Splits a node, which uses nothing."""
    tree.unpin(tree.pin(look(tree, prompt), Pin.HERE, pages))


def test_both_parts_of_a_node_came_when_it_came():
    tree = tree_of(policy=POLICIES["fifo"]())
    put(tree, "abcd", 0)
    put(tree, "xy", 10)
    tree.touch(look(tree, "abcd"), 4)
    cut(tree, "abcd", 2)
    assert [victims(tree, 2) for _ in range(3)] == [[2, 3], [0, 1], [10, 11]]


@pytest.mark.parametrize("make", [Slru, S3Fifo, Priority])
def test_both_parts_of_a_node_stay_longer(make):
    tree = tree_of(policy=make(), device_slots=20)
    put(tree, "abcd", 0)
    for _ in range(2):
        tree.touch(look(tree, "abcd"), 4, Wish(1))
    cut(tree, "abcd", 2)
    assert bounded_pages(tree) == 4
    assert victims(tree, 2) == [2, 3]
    put(tree, "z", 10)
    assert [victims(tree, 1) for _ in range(3)] == [[10], [1], [0]]


@pytest.mark.parametrize("make", [lambda: Slru(0.5), lambda: S3Fifo(0.5), lambda: Priority(0.5)])
def test_a_node_that_lost_pages_leaves_room_for_others(make):
    tree = tree_of(policy=make(), device_slots=8)
    for number, prompt in enumerate(("abcd", "xy")):
        put(tree, prompt, 10 * number)
        for _ in range(2):
            tree.touch(look(tree, prompt), 4, Wish(1))
        if number == 0:
            assert victims(tree, 2) == [2, 3]
    assert bounded_pages(tree) == 4


def test_what_is_costly_goes_too_once_it_was_long_enough_of_no_use():
    tree = tree_of(policy=CostAware(PAGE))
    put(tree, "abcdefgh", 0)
    gone = []
    for number, page in enumerate("qrstuvwxyz", 10):
        put(tree, page, number)
        gone += victims(tree, 1)
    assert 3 <= gone.index(7) <= 6


def test_a_node_saves_what_lies_between_two_places_to_resume_at():
    tree = tree_of(Full(), Checkpoint())
    put(tree, "abcdefg", 0, only={"a": slots(None, 1, None, None, None, 5, None)})
    for stop in (6, 4):
        cut(tree, "abcdefg", stop)
    view = View(tree._core)
    saved = [view.tokens_saved(node) for node in tree._core.walk()]
    assert saved == [(0, 2 * PAGE), (2 * PAGE, 6 * PAGE), (6 * PAGE, 6 * PAGE)]
    assert [view.bytes_kept(node) for node in tree._core.walk()] == [PAGE * 5 / 2, PAGE * 3 / 2, PAGE / 2]
