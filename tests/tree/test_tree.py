import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.coverage import Checkpoint, Full, Window, longest_usable
from hicache.errors import ConfigError, InvariantError
from hicache.keys import Namespace, page_keys
from hicache.tree import Pin, RadixTree, TreePool
from hicache.units import HOLE, Tier
from tests.tree.trees import NAMESPACE, PAGE, lengths, look, put, slots, tokens, tree_of

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def test_an_empty_tree_knows_nothing():
    tree = tree_of()
    match = look(tree, "abc")
    assert lengths(match) == (0, 0, 0)
    assert tree.slots(match, "kv", DEVICE, 0, 2).tolist() == [HOLE, HOLE]
    tree.unpin(tree.pin(match, Pin.HERE, 0))
    tree.check()


def test_a_match_gives_the_slots_of_the_longest_known_prefix():
    tree = tree_of()
    put(tree, "abcd", 10)
    put(tree, "abxy", 20)
    match = look(tree, "abxyz")
    assert lengths(match) == (4, 4, 4)
    assert tree.slots(match, "kv", DEVICE, 0, 4).tolist() == [10, 11, 22, 23]
    assert tree.slots(match, "kv", DEVICE, 1, 3).tolist() == [11, 22]


def test_a_match_ends_at_whole_pages_and_at_its_limit_and_splits_nothing():
    tree = tree_of()
    put(tree, "abcd", 0)
    assert lengths(tree.match(NAMESPACE, tokens("abcd")[:-4])) == (3, 3, 3)
    assert lengths(look(tree, "abcd", 2)) == (2, 2, 2)
    assert lengths(look(tree, "abx")) == (2, 2, 2)
    assert tree.nodes == 1


def test_two_prompts_that_part_within_a_page_share_nothing_of_that_page():
    tree = tree_of()
    first = np.arange(8, dtype=np.uint32)
    second = first.copy()
    second[7] = 99
    tree.insert(NAMESPACE, first.tobytes(), 0, {"kv": slots(0, 1)})
    assert tree.match(NAMESPACE, second.tobytes()).pages == 1


def test_what_is_already_there_comes_back():
    tree = tree_of(Full(), Checkpoint())
    put(tree, "ab", 0, only={"a": slots(None, 1)})
    result = tree.insert(NAMESPACE, tokens("abc"), 0, {"kv": slots(10, 11, 12), "a": slots(10, 11, 12)})
    assert result.duplicates["kv"].tolist() == [10, 11]
    assert result.duplicates["a"].tolist() == [11]
    assert result.added == {"kv": 1, "a": 2}
    assert lengths(result.match) == (3, 3, 3)


def test_insert_refuses_runs_that_do_not_fit():
    tree = tree_of(Full(), Checkpoint())
    with pytest.raises(InvariantError, match="differ in length"):
        tree.insert(NAMESPACE, tokens("ab"), 0, {"kv": slots(0, 1), "a": slots(0)})
    with pytest.raises(InvariantError, match="3 pages were inserted"):
        tree.insert(NAMESPACE, tokens("ab"), 0, {"kv": slots(0, 1, 2)})
    with pytest.raises(ConfigError, match="'mamba' is not in the tree"):
        tree.insert(NAMESPACE, tokens("ab"), 0, {"mamba": slots(0, 1)})
    with pytest.raises(InvariantError, match="storage has no node"):
        tree.insert(NAMESPACE, tokens("ab"), 0, {"kv": slots(0, 1)}, Tier.STORAGE)


def test_a_tree_refuses_pools_that_contradict_each_other():
    with pytest.raises(ConfigError, match="at least one pool"):
        RadixTree(PAGE, [])
    with pytest.raises(ConfigError, match="names must differ"):
        RadixTree(PAGE, [TreePool("kv", Full()), TreePool("kv", Full())])
    with pytest.raises(ConfigError, match="page_size is 0"):
        RadixTree(0, [TreePool("kv", Full())])


def test_a_hole_ends_what_is_usable_and_insert_fills_it():
    tree = tree_of()
    match = put(tree, "abcd", 0)
    gone = tree.detach(tree.span(match, 1, 2), DEVICE, ["kv"])
    assert gone.slots("kv", DEVICE).tolist() == [1]
    tree.check()
    assert lengths(look(tree, "abcd")) == (4, 1, 1)
    result = tree.insert(NAMESPACE, tokens("abcd"), 0, {"kv": slots(10, 11, 12, 13)})
    assert result.duplicates["kv"].tolist() == [10, 12, 13]
    assert lengths(result.match) == (4, 4, 4)
    assert tree.slots(result.match, "kv", DEVICE, 0, 4).tolist() == [0, 11, 2, 3]
    tree.check()


def test_pages_of_full_pools_come_together_or_not_at_all():
    tree = tree_of(Full(), Full())
    result = tree.insert(NAMESPACE, tokens("abc"), 0, {"kv": slots(0, 1, 2), "a": slots(0, None, 2)})
    assert result.duplicates["kv"].tolist() == [1]
    assert lengths(result.match) == (3, 1, 1)
    assert tree.resident("kv", DEVICE).tolist() == tree.resident("a", DEVICE).tolist() == [0, 2]
    tree.check()


def test_a_sidecar_page_is_refused_where_the_anchor_has_none():
    tree = tree_of(Full(), Checkpoint())
    result = tree.insert(NAMESPACE, tokens("ab"), 0, {"a": slots(5, 6)})
    assert result.duplicates["a"].tolist() == [5, 6]
    assert tree.nodes == 0
    tree.check()


def test_device_and_host_together_make_up_what_is_usable():
    tree = tree_of(Full(), Window(PAGE + 1), Checkpoint())
    put(tree, "abcd", 0, only={"a": slots(None, 1, None, None), "b": slots(None, 1, None, None)})
    put(tree, "abcdef", 0, HOST, only={"a": slots(*[None] * 5, 5), "b": slots(*[None] * 5, 5)})
    match = look(tree, "abcdefg")
    assert lengths(match) == (6, 2, 6)
    assert tree.slots(match, "kv", HOST, 0, 6).tolist() == [0, 1, 2, 3, 4, 5]
    tree.check()


@given(
    reach=st.integers(1, 30),
    held=st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 11)),
)
def test_usable_lengths_are_those_of_the_coverages(reach: int, held: list[tuple[int, int, int]], cuts: set[int]):
    tree = tree_of(Full(), Window(reach), Checkpoint())
    prompt = "abcdefghijkl"[: len(held)]
    places = {"kv": 0, "a": 1, "b": 2}
    for tier, bit in ((DEVICE, 1), (HOST, 2)):
        runs = {
            name: slots(*[number if page[place] & bit else None for number, page in enumerate(held)])
            for name, place in places.items()
        }
        tree.insert(NAMESPACE, tokens(prompt), 0, runs, tier)
    for cut in sorted(cuts):
        match = look(tree, prompt)
        if cut <= match.pages:
            tree.unpin(tree.pin(match, Pin.SOMEWHERE, cut))
    tree.check()
    match = look(tree, prompt)
    coverages = [pool.coverage for pool in tree.pools]
    for tiers, found in (((DEVICE,), match.device_pages), ((DEVICE, HOST), match.usable_pages)):
        present = [
            np.any([tree.slots(match, pool.name, tier, 0, match.pages) >= 0 for tier in tiers], axis=0)
            for pool in tree.pools
        ]
        assert found == longest_usable(zip(coverages, present, strict=True), PAGE)


def test_slots_of_a_match_stay_right_when_its_nodes_are_split():
    tree = tree_of(Full(), Window(PAGE + 1))
    match = put(tree, "abcdef", 0)
    put(tree, "abxx", 20)
    tree.unpin(tree.pin(look(tree, "abcde"), Pin.HERE, 5))
    assert tree.nodes > 3
    for start in range(6):
        assert tree.slots(match, "kv", DEVICE, start, 6).tolist() == list(range(start, 6))


def test_slots_of_a_match_are_holes_once_its_pages_have_left():
    tree = tree_of()
    match = put(tree, "abcd", 0)
    tree.evict("kv", DEVICE, 2, drop_dirty=True)
    assert tree.slots(match, "kv", DEVICE, 0, 4).tolist() == [0, 1, HOLE, HOLE]
    tree.evict("kv", DEVICE, 2, drop_dirty=True)
    assert tree.slots(match, "kv", DEVICE, 0, 4).tolist() == [HOLE] * 4
    with pytest.raises(InvariantError, match="has left the tree"):
        tree.pin(match, Pin.HERE, 4)


def test_a_transfer_settles_after_its_span_was_split():
    tree = tree_of()
    match = put(tree, "abcdef", 0)
    span = tree.span(match, 1, 6)
    pinned = tree.pin_span(span, Pin.HERE)
    put(tree, "abcx", 20)
    put(tree, "abx", 30)
    assert tree.attach(span, HOST, {"kv": slots(101, 102, 103, 104, 105)}) == {}
    tree.unpin(pinned)
    match = look(tree, "abcdef")
    assert tree.slots(match, "kv", HOST, 0, 6).tolist() == [HOLE, 101, 102, 103, 104, 105]
    tree.check()


def test_slots_that_come_too_late_go_back():
    tree = tree_of()
    match = put(tree, "abcd", 0)
    span = tree.span(match, 0, 4)
    tree.evict("kv", DEVICE, 4, drop_dirty=True)
    refused = tree.attach(span, HOST, {"kv": slots(1, 2, 3, 4)})
    assert sorted(refused["kv"].tolist()) == [1, 2, 3, 4]
    assert tree.nodes == 0


def test_page_keys_chain_from_the_namespace_whatever_was_split_when():
    tree = tree_of()
    match = put(tree, "abcd", 0)
    expected = page_keys(NAMESPACE, tokens("abcd"), PAGE)
    assert tree.page_keys(tree.span(match, 1, 3)) == expected[32:96]
    put(tree, "abxy", 10)
    assert tree.page_keys(tree.span(look(tree, "abxy"), 0, 4)) == page_keys(NAMESPACE, tokens("abxy"), PAGE)
    match = look(tree, "abcd")
    assert tree.page_keys(tree.span(match, 0, 4)) == expected
    assert expected[:32] == hashlib.sha256(NAMESPACE + tokens("a")).digest()
    assert tree.keys_beyond(look(tree, "abzz"), tokens("abzz")) == page_keys(NAMESPACE, tokens("abzz"), PAGE)[64:]
    assert tree.tokens(tree.span(match, 1, 4)) == tokens("bcd")


def test_lookahead_is_part_of_a_pages_identity():
    tree = tree_of(lookahead_tokens=2)
    put_tokens = tokens("ab") + tokens("c")[:8]
    tree.insert(NAMESPACE, put_tokens, 0, {"kv": slots(0, 1)})
    assert tree.match(NAMESPACE, put_tokens).pages == 2
    assert tree.match(NAMESPACE, tokens("ab")).pages == 1
    assert tree.match(NAMESPACE, tokens("abx")).pages == 1
    match = tree.match(NAMESPACE, put_tokens)
    assert tree.tokens(tree.span(match, 0, 2)) == tokens("ab")
    other = page_keys(NAMESPACE, tokens("ab"), PAGE)
    assert tree.page_keys(tree.span(match, 0, 2)) != other


def test_stored_marks_are_per_pool_and_attachment_and_follow_splits():
    tree = tree_of(Full(), Checkpoint())
    match = put(tree, "abcd", 0)
    span = tree.span(match, 1, 4)
    tree.mark_stored(span, "kv", 1, np.array([True, False, True]))
    put(tree, "abx", 10)
    assert tree.unstored(span, "kv", 1).tolist() == [False, True, False]
    assert tree.unstored(span, "a", 1).all()
    assert tree.unstored(span, "kv", 2).all()
    tree.unmark_stored(tree.span(match, 3, 4), "kv", 1)
    assert tree.unstored(span, "kv", 1).tolist() == [False, True, True]
    tree.mark_stored(span, "kv", 2)
    assert not tree.unstored(span, "kv", 2).any()
    tree.check()


@pytest.mark.parametrize(
    "change",
    [
        {"adapter": "X"},
        {"salt": "X"},
        {"weights": "w2"},
        {"dtype": "float32"},
        {"geometry": "g2"},
        {"shard": "1/2"},
        {"draft_lookahead": 1},
    ],
)
def test_s10_equal_tokens_in_another_namespace_are_other_pages(change: dict[str, str]):
    base: dict[str, Any] = {"model": "m", "weights": "w", "dtype": "bfloat16", "page_size": PAGE, "geometry": "g"}
    ours = Namespace(**base).fingerprint
    other = Namespace(**{**base, **change}).fingerprint
    tree = tree_of()
    for tier in (DEVICE, HOST):
        tree.insert(ours, tokens("abc"), 0, {"kv": slots(0, 1, 2)}, tier)
    assert lengths(tree.match(other, tokens("abc"))) == (0, 0, 0)
    assert lengths(tree.match(ours, tokens("abc"))) == (3, 3, 3)
    tree.insert(other, tokens("abc"), 0, {"kv": slots(3, 4, 5)})
    keys = [tree.page_keys(tree.span(tree.match(name, tokens("abc")), 0, 3)) for name in (ours, other)]
    assert keys[0] != keys[1]
    assert tree.namespace(tree.span(tree.match(other, tokens("abc")), 0, 3)) == other
    freed = tree.flush(other)
    assert freed.slots("kv", DEVICE).tolist() == [3, 4, 5]
    assert lengths(tree.match(ours, tokens("abc"))) == (3, 3, 3)
    tree.check()


def test_s10_an_adapter_named_as_a_salt_is_not_that_salt():
    base: dict[str, Any] = {"model": "m", "weights": "w", "dtype": "bfloat16", "page_size": PAGE, "geometry": "g"}
    tree = tree_of()
    tree.insert(Namespace(**base, adapter="X").fingerprint, tokens("ab"), 0, {"kv": slots(0, 1)})
    assert tree.match(Namespace(**base, salt="X").fingerprint, tokens("ab")).pages == 0


def test_s11_every_length_comes_back_and_the_hit_grows_with_the_prompt():
    tree = tree_of(Full(), Window(3 * PAGE), Checkpoint())
    every = np.arange(300 * PAGE, dtype=np.uint32)
    stored = 0
    for pages in range(1, 301):
        runs = {pool.name: np.arange(stored, pages, dtype=np.int32) for pool in tree.pools}
        tree.insert(NAMESPACE, every[: pages * PAGE].tobytes(), stored, runs)
        stored = pages
        match = tree.match(NAMESPACE, every.tobytes())
        assert lengths(match) == (pages, pages, pages)
        assert tree.slots(match, "kv", DEVICE, 0, pages).tolist() == list(range(pages))
    last = 0
    for count in range(1, 300 * PAGE + 1):
        if count % PAGE in (0, 1, PAGE - 1):
            match = tree.match(NAMESPACE, every[:count].tobytes())
            assert match.device_pages == count // PAGE >= last
            last = match.device_pages
    tree.check()


@pytest.mark.parametrize("pages", [1, 2, 3, 64, 299, 300])
def test_s11_a_prefix_of_every_length_is_found_in_one_node(pages: int):
    tree = tree_of()
    every = np.arange(300 * PAGE, dtype=np.uint32)
    tree.insert(NAMESPACE, every.tobytes(), 0, {"kv": np.arange(300, dtype=np.int32)})
    for count in (pages * PAGE - 1, pages * PAGE, pages * PAGE + 1):
        match = tree.match(NAMESPACE, every[:count].tobytes())
        assert match.pages == min(count, 300 * PAGE) // PAGE
        assert tree.slots(match, "kv", DEVICE, 0, match.pages).tolist() == list(range(match.pages))


def test_s14_repeated_lookups_leave_no_pin_and_everything_evictable():
    tree = tree_of(Full(), Window(2 * PAGE), Checkpoint())
    put(tree, "abcdef", 0)
    put(tree, "abcd", 0, HOST)
    for _ in range(5):
        match = look(tree, "abcdefg")
        here = tree.pin(match, Pin.HERE, match.device_pages)
        loads = tree.pin(match, Pin.HOST, match.usable_pages, match.device_pages)
        tree.unpin(here)
        tree.unpin(loads)
    assert tree.pins_total() == 0
    for pool in tree.pools:
        for tier in (DEVICE, HOST):
            assert tree.evictable(pool.name, tier) == len(tree.resident(pool.name, tier))
    tree.check()
