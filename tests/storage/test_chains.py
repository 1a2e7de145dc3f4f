"""The order of eviction: the oldest chain first, tails before heads, all pools of a page together."""

from hypothesis import given
from hypothesis import strategies as st

from hicache.storage.chains import ENTRY_ID_BYTES, PAGE_ID_BYTES, ChainIndex, EntryId, entry_id
from hicache.testing.storage import sample_chain


def entries(count: int, chain: str = "a", pool: str = "kv") -> list[EntryId]:
    return [entry_id(key) for key in sample_chain(count, chain=chain, pool=pool)]


def drain(index: ChainIndex) -> list[EntryId]:
    gone = []
    while victim := index.victim():
        for entry in victim:
            assert index.remove(entry)
            gone.append(entry)
    return gone


def test_an_entry_id_names_pages_and_pool():
    first, second = entries(2)
    assert len(first) == ENTRY_ID_BYTES
    assert second[PAGE_ID_BYTES : 2 * PAGE_ID_BYTES] == first[:PAGE_ID_BYTES]
    assert entries(1, pool="state")[0][: 2 * PAGE_ID_BYTES] == first[: 2 * PAGE_ID_BYTES]


def test_a_chain_goes_from_its_tail_although_its_head_is_older():
    index, chain = ChainIndex(), entries(5)
    for i, entry in enumerate(chain):
        index.add(entry, 10, i)
    assert drain(index) == chain[::-1]
    assert (index.total_bytes, len(index)) == (0, 0)


def test_the_chain_used_longest_ago_goes_first_and_whole():
    index, old, young = ChainIndex(), entries(3, "old"), entries(3, "young")
    for i, entry in enumerate([*young, *old]):
        index.add(entry, 10, i)
    assert index.touch(young[2], 10) == 2
    assert drain(index) == old[::-1] + young[::-1]


def test_a_head_is_as_young_as_what_was_used_behind_it():
    index, hot, cold = ChainIndex(), entries(3, "hot"), entries(1, "cold")
    for i, entry in enumerate(hot):
        index.add(entry, 10, i)
    index.add(cold[0], 10, 5)
    index.touch(hot[2], 9)
    assert index.victim() == (cold[0],)
    index.remove(hot[2])
    assert drain(index) == [cold[0], hot[1], hot[0]], "the head takes over the age of the tail that went"


def test_all_pools_of_a_page_go_together():
    index, kv, state = ChainIndex(), entries(2), entries(2, pool="state")
    for entry in [*kv, state[1]]:
        index.add(entry, 10, 1)
    assert set(index.victim()) == {kv[1], state[1]}


def test_what_is_being_written_holds_the_pages_before_it():
    index, chain = ChainIndex(), entries(3)
    index.add(chain[0], 10, 1)
    index.add(chain[1], 10, 2)
    index.reserve(chain[2], 10)
    assert index.total_bytes == 30
    assert index.victim() == ()
    assert index.cancel(chain[2], 10)
    assert not index.cancel(chain[2], 10)
    assert index.victim() == (chain[1],)
    index.reserve(chain[2], 10)
    index.commit(chain[2], 10, 3)
    assert index.victim() == (chain[2],)


def test_an_entry_that_is_replaced_counts_once():
    index, [entry] = ChainIndex(), entries(1)
    index.add(entry, 10, 1)
    index.add(entry, 25, 2)
    assert (index.total_bytes, index.size(entry), index.last_used_ns(entry)) == (25, 25, 2)
    assert index.remove(entry)
    assert not index.remove(entry)
    assert index.touch(entry, 3) == 0
    assert index.total_bytes == 0


TREE = {"a": entries(4, "a"), "b": entries(3, "b")}
OPERATIONS = st.tuples(
    st.sampled_from(["add", "touch", "remove", "evict", "reserve", "cancel", "commit"]),
    st.sampled_from(sorted(TREE)),
    st.integers(0, 3),
    st.sampled_from([1, 10]),
)


class Model:
    """The same rules, by looking at everything every time."""

    def __init__(self) -> None:
        self.stored: dict[EntryId, int] = {}
        self.reserved: list[tuple[EntryId, int]] = []

    def evictable(self) -> set[EntryId]:
        busy = {entry for entry, _ in self.reserved}
        parents = {entry[PAGE_ID_BYTES : 2 * PAGE_ID_BYTES] for entry in busy | set(self.stored)}
        return {entry for entry in self.stored if entry[:PAGE_ID_BYTES] not in parents and entry not in busy}


def step(index: ChainIndex, model: Model, operation: str, entry: EntryId, size: int, now: int) -> None:
    if operation == "add":
        index.add(entry, size, now)
        model.stored[entry] = size
    elif operation == "touch":
        index.touch(entry, now)
    elif operation == "remove":
        assert index.remove(entry) == (model.stored.pop(entry, None) is not None)
    elif operation == "reserve":
        index.reserve(entry, size)
        model.reserved.append((entry, size))
    elif operation in ("cancel", "commit") and (entry, size) in model.reserved:
        model.reserved.remove((entry, size))
        if operation == "commit":
            index.commit(entry, size, now)
            model.stored[entry] = size
        else:
            assert index.cancel(entry, size)


@given(st.lists(OPERATIONS, max_size=60))
def test_the_index_agrees_with_a_model_that_looks_at_everything(operations):
    index, model = ChainIndex(), Model()
    for now, (operation, chain, i, size) in enumerate(operations):
        entry = TREE[chain][min(i, len(TREE[chain]) - 1)]
        if operation == "evict":
            for gone in index.victim():
                index.remove(gone)
                del model.stored[gone]
        else:
            step(index, model, operation, entry, size, now)
        assert index.total_bytes == sum(model.stored.values()) + sum(size for _, size in model.reserved)
        assert set(index) == set(model.stored)
        evictable = model.evictable()
        victim = index.victim()
        assert set(victim) <= evictable
        assert bool(victim) == bool(evictable)
        if victim:
            assert index.last_used_ns(victim[0]) == min(map(index.last_used_ns, evictable))
