"""The tree against a plain dict of pages, under every order of calls that Hypothesis comes up with."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache.coverage import Checkpoint, Coverage, Full, Window
from hicache.keys import page_keys
from hicache.tree import NO_WISH, POLICIES, Pin, RadixTree, Receipt, Span, TreeMatch, TreePool, Wish
from hicache.units import HOLE, Tier
from tests.tree.model import TIERS, Key, Model

PAGE = 2
NAMESPACES = (bytes([1]) * 32, bytes([2]) * 32)

coverages = st.one_of(st.just(Full()), st.just(Full()), st.builds(Window, st.integers(2, 9)), st.just(Checkpoint()))
paths = st.tuples(
    st.integers(0, 30),
    st.sampled_from([0, 0, 0, 1, 2, 4]),
    st.just([]) | st.lists(st.integers(0, 2), max_size=4),
)
"""A prompt inserted before, how many of its last pages are left off, and pages put in their place."""
tiers = st.sampled_from(TIERS)
namespaces = st.sampled_from((NAMESPACES[0], NAMESPACES[0], NAMESPACES[0], NAMESPACES[1]))
wishes = st.sampled_from((NO_WISH, NO_WISH, Wish(2), Wish(1, 5.0), Wish(3, 1.0), Wish(-1)))
fractions = st.sampled_from([0, 0, 0, 2, 4, 6, 8])

Path = tuple[int, int, list[int]]


class Insertion(NamedTuple):
    namespace: bytes
    path: Path
    after_match: bool
    holes: list[list[bool]]
    full_holes: bool
    left_out: set[int]
    wish: Wish = NO_WISH


insertions = st.builds(
    Insertion,
    namespaces,
    paths,
    st.booleans(),
    st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=4, max_size=4),
    st.sampled_from([False, False, False, False, False, True]),
    st.just(set()) | st.just(set()) | st.just(set()) | st.sets(st.integers(0, 3), max_size=2),
    wishes,
)


@dataclass
class Backup:
    span: Span
    receipt: Receipt
    keys: list[Key]


class TreeMachine(RuleBasedStateMachine):
    @initialize(
        coverage=st.lists(coverages, min_size=1, max_size=4),
        lookahead=st.sampled_from([0, 0, 1]),
        duplicates_first=st.booleans(),
        policy=st.sampled_from(list(POLICIES)),
        device_slots=st.sampled_from([None, 4, 20]),
    )
    def start(
        self, coverage: list[Coverage], lookahead: int, duplicates_first: bool, policy: str, device_slots: int | None
    ) -> None:
        pools = [TreePool(f"pool{number}", each, number + 1, device_slots) for number, each in enumerate(coverage)]
        self.names = [pool.name for pool in pools]
        self.tree = RadixTree(
            PAGE,
            pools,
            policy=POLICIES[policy](),
            lookahead_tokens=lookahead,
            host_duplicates_first=duplicates_first,
        )
        self.now_s = 0.0
        self.model = Model(PAGE, lookahead, pools)
        self.lookahead = lookahead
        self.main = (self.model.full or self.names)[0]
        self.next_slot = 0
        self.known: list[list[int]] = [[]]
        self.receipts: list[Receipt] = []
        self.backups: list[Backup] = []
        self.detached: set[Key] = set()

    def prompt(self, path: Path) -> list[int]:
        which, back, more = path
        known = self.known[-1 - which % len(self.known)]
        return (known[: len(known) - back] + more)[:9] or [0, 1, 2, 0, 1]

    def tokens(self, prompt: list[int]) -> bytes:
        ids = [token for page in prompt for token in (page, 7)] + [9] * self.lookahead
        return np.array(ids, np.uint32).tobytes()

    def match(self, namespace: bytes, path: Path) -> tuple[TreeMatch, list[Key]]:
        tokens = self.tokens(self.prompt(path))
        return self.tree.match(namespace, tokens), self.model.keys(namespace, tokens)

    def fresh(self, pages: int, holes: list[bool]) -> np.ndarray:
        slots = np.arange(self.next_slot, self.next_slot + pages, dtype=np.int32)
        self.next_slot += pages
        slots[np.array([holes[page % len(holes)] for page in range(pages)], np.bool_)] = HOLE
        return slots

    def pool(self, number: int) -> str:
        return self.names[number % len(self.names)]

    # Putting in

    @rule(given=insertions)
    def insert(self, given: Insertion) -> None:
        self.put_in(given, Tier.DEVICE)

    @rule(first=insertions, second=insertions, third=insertions)
    def insert_three(self, first: Insertion, second: Insertion, third: Insertion) -> None:
        for given in (first, second, third):
            self.put_in(given, Tier.DEVICE)

    @rule(given=insertions)
    def insert_on_host(self, given: Insertion) -> None:
        self.put_in(given, Tier.HOST)

    @rule(path=paths, namespace=namespaces)
    def insert_same_on_host(self, path: Path, namespace: bytes) -> None:
        self.put_in(Insertion(namespace, path, False, [[False]] * 4, False, set()), Tier.HOST)

    def put_in(self, given: Insertion, tier: Tier) -> None:
        namespace, path, after_match, holes, full_holes, left_out, wish = given
        match, keys = self.match(namespace, path)
        prompt = self.prompt(path)
        self.known.append(prompt)
        first = match.device_pages if after_match else 0
        runs = {}
        for number, name in enumerate(self.names):
            whole = name in self.model.full and not full_holes
            if number not in left_out:
                runs[name] = self.fresh(len(prompt) - first, [False] if whole else holes[number])
        result = self.tree.insert(
            namespace, self.tokens(prompt), first, runs, tier, known=match if after_match else None, wish=wish
        )
        refused = self.model.insert(keys[first:], runs, tier)
        for name in self.names:
            assert sorted(result.duplicates.get(name, [])) == sorted(refused[name])
            offered = int((runs[name] != HOLE).sum()) if name in runs else 0
            assert result.added[name] == offered - len(refused[name])
        covered = keys if runs else keys[:first]
        assert result.match.device_pages == self.model.usable(covered, (Tier.DEVICE,))
        assert result.match.usable_pages == self.model.usable(covered, TIERS)

    # Looking up

    @rule(namespace=namespaces, path=paths, limit=st.integers(0, 9))
    def look_up(self, namespace: bytes, path: Path, limit: int) -> None:
        tokens = self.tokens(self.prompt(path))
        keys = self.model.keys(namespace, tokens, limit)
        match = self.tree.match(namespace, tokens, limit)
        assert match.device_pages == self.model.usable(keys, (Tier.DEVICE,))
        assert match.usable_pages == self.model.usable(keys, TIERS)
        for tier in TIERS:
            for name in self.names:
                known = [self.model.slots[tier][name].get(key, HOLE) for key in keys]
                assert known[match.pages :] == [HOLE] * (len(keys) - match.pages)
                for start in (0, match.pages // 2):
                    found = self.tree.slots(match, name, tier, start, match.pages)
                    assert found.tolist() == known[start : match.pages]
        span = self.tree.span(match, 0, match.pages)
        block = PAGE + self.lookahead
        blocks = b"".join(key[1][-4 * block :] for key in keys)
        chain = page_keys(namespace, blocks, block)
        assert self.tree.page_keys(span) == chain[: 32 * match.pages]
        assert self.tree.keys_beyond(match, tokens, limit) == chain[32 * match.pages :]
        assert self.tree.tokens(span) == tokens[: 4 * PAGE * match.pages]

    @rule(namespace=namespaces, path=paths, part=fractions, wish=wishes, later_s=st.sampled_from([0.0, 0.0, 2.0]))
    def touch(self, namespace: bytes, path: Path, part: int, wish: Wish, later_s: float) -> None:
        self.now_s += later_s
        self.tree.advance(self.now_s)
        match, _ = self.match(namespace, path)
        self.tree.touch(match, match.pages - match.pages * part // 8, wish)

    # Pinning

    @rule(
        namespace=namespaces,
        path=paths,
        pin=st.sampled_from(list(Pin)),
        part=fractions,
        start_part=fractions,
        squeeze=st.sampled_from([False] * 5 + [True]),
    )
    def pin(self, namespace: bytes, path: Path, pin: Pin, part: int, start_part: int, squeeze: bool) -> None:
        match, keys = self.match(namespace, path)
        pages = match.pages - match.pages * part // 8
        start = pages * start_part // 16
        receipt = self.tree.pin(match, pin, pages, start)
        self.receipts.append(receipt)
        self.model.pin(receipt.serial, pin, self.model.required(keys, start, pages))
        if squeeze:
            self.evict_everything()

    @rule(
        namespace=namespaces,
        path=paths,
        pin=st.sampled_from(list(Pin)),
        part=fractions,
        start_part=fractions,
        numbers=st.none() | st.sets(st.integers(0, 3), min_size=1),
        squeeze=st.sampled_from([False] * 5 + [True]),
    )
    def pin_span(
        self,
        namespace: bytes,
        path: Path,
        pin: Pin,
        part: int,
        start_part: int,
        numbers: set[int] | None,
        squeeze: bool,
    ) -> None:
        match, keys = self.match(namespace, path)
        stop = match.pages - match.pages * part // 8
        start = stop * start_part // 8
        names = None if numbers is None else sorted({self.pool(number) for number in numbers})
        receipt = self.tree.pin_span(self.tree.span(match, start, stop), pin, names)
        self.receipts.append(receipt)
        pages = set(keys[start:stop])
        self.model.pin(receipt.serial, pin, dict.fromkeys(names or self.names, pages))
        if squeeze:
            self.evict_everything()

    def evict_everything(self) -> None:
        for tier in TIERS:
            self.evict(self.main, tier, 1000, True)
            self.tree.check()

    @precondition(lambda self: self.receipts)
    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        receipt = self.receipts.pop(which % len(self.receipts))
        self.tree.unpin(receipt)
        del self.model.pins[receipt.serial]

    @precondition(lambda self: self.receipts and len(self.model.full) < len(self.names))
    @rule(which=st.integers(0, 99), number=st.integers(0, 3), page=st.integers(0, 9))
    def unpin_before(self, which: int, number: int, page: int) -> None:
        loose = [name for name in self.names if name not in self.model.full]
        name = loose[number % len(loose)]
        receipt = self.receipts.pop(which % len(self.receipts))
        left = self.tree.unpin_before(receipt, name, page)
        self.receipts.append(left)
        pinned = self.model.pins.pop(receipt.serial)
        kept = {key for key in pinned.pages.get(name, set()) if len(self.model.prefix(key)) > page}
        self.model.pin(left.serial, pinned.pin, {**pinned.pages, name: kept})

    # Taking out

    @rule(count=st.sampled_from([1, 1, 2, 2, 3, 5, 1000]), drop_dirty=st.sampled_from([True, True, False]))
    def evict_from_device(self, count: int, drop_dirty: bool) -> None:
        self.evict(self.main, Tier.DEVICE, count, drop_dirty)

    @rule(count=st.sampled_from([1, 1, 2, 2, 3, 5, 1000]))
    def evict_from_host(self, count: int) -> None:
        self.evict(self.main, Tier.HOST, count, True)

    @rule(
        number=st.integers(0, 3), tier=tiers, count=st.sampled_from([1, 1, 2, 2, 3, 5, 1000]), drop_dirty=st.booleans()
    )
    def evict_from_pool(self, number: int, tier: Tier, count: int, drop_dirty: bool) -> None:
        self.evict(self.pool(number), tier, count, drop_dirty)

    def evict(self, name: str, tier: Tier, count: int, drop_dirty: bool) -> None:
        could = self.tree.evictable(name, tier)
        spendable = self.model.useless(tier) if name in self.model.full else 0
        before = self.model.usable_everywhere()
        eviction = self.tree.evict(name, tier, count, drop_dirty=drop_dirty)
        gone = self.model.remove(eviction)
        self.model.assert_pins_held(gone)
        self.model.assert_leaves_first(gone)
        if tier is Tier.HOST and self.model.full:
            assert not gone[Tier.DEVICE][self.model.full[0]], "making room on the host took device pages"
        freed = eviction.count(name, tier)
        if drop_dirty or tier is Tier.HOST:
            assert freed >= min(count, could)
            assert count < 1000 or freed == could
        if count <= spendable or (tier is Tier.DEVICE and not drop_dirty):
            for key, usable in before.items():
                assert self.model.usable(self.model.prefix(key), TIERS) == usable, "something of use was lost"

    @rule(number=st.integers(0, 3), count=st.sampled_from([1, 3, 100]))
    def start_backup(self, number: int, count: int) -> None:
        name = self.pool(number)
        device, host = self.model.slots[Tier.DEVICE][name], self.model.slots[Tier.HOST][name]
        for found in self.tree.dirty(name, count):
            span = self.tree.narrow(found)
            namespace = self.tree.namespace(span)
            ahead = (
                bytes(self.tree.tokens(Span(span.node, 0, span.stop)))
                + np.array([9] * self.lookahead, np.uint32).tobytes()
            )
            keys = self.model.keys(namespace, ahead) if not self.lookahead else self.keys_of(span, namespace)
            for key in keys[span.start :]:
                assert key in device and key not in host, "a page to be written back is not dirty"
                assert not any(
                    pinned.pin is Pin.HERE and key in pinned.pages.get(name, ()) for pinned in self.model.pins.values()
                )
            receipt = self.tree.pin_span(span, Pin.HERE)
            self.model.pin(receipt.serial, Pin.HERE, {each: set(keys[span.start :]) for each in self.names})
            self.backups.append(Backup(span, receipt, keys[span.start :]))

    def keys_of(self, span: Span, namespace: bytes) -> list[Key]:
        """The model's pages of a span's whole prefix, by the slots they have: for when lookahead is not in `tokens`."""
        chain = self.tree.page_keys(Span(span.node, 0, span.stop))
        block = PAGE + self.lookahead
        for key in self.model.resident():
            prefix = self.model.prefix(key)
            blocks = b"".join(page[1][-4 * block :] for page in prefix)
            if key[0] == namespace and page_keys(namespace, blocks, block) == chain:
                return prefix
        raise AssertionError("a span's pages are not in the model")

    @precondition(lambda self: self.backups)
    @rule(which=st.integers(0, 99), lost=st.booleans(), holes=st.lists(st.booleans(), min_size=1, max_size=5))
    def settle_backup(self, which: int, lost: bool, holes: list[bool]) -> None:
        backup = self.backups.pop(which % len(self.backups))
        if not lost:
            runs = {
                name: self.fresh(len(backup.span), [False] if name in self.model.full else holes) for name in self.names
            }
            refused = self.tree.attach(backup.span, Tier.HOST, runs)
            expected = self.model.insert(backup.keys, runs, Tier.HOST)
            for name in self.names:
                assert sorted(refused.get(name, [])) == sorted(expected[name])
        self.tree.unpin(backup.receipt)
        del self.model.pins[backup.receipt.serial]

    @precondition(lambda self: len(self.known) % 4 == 3)
    @rule(
        namespace=namespaces,
        path=paths,
        tier=tiers,
        number=st.integers(0, 3),
        part=fractions,
        start_part=fractions,
    )
    def detach(self, namespace: bytes, path: Path, tier: Tier, number: int, part: int, start_part: int) -> None:
        match, keys = self.match(namespace, path)
        stop = match.pages - match.pages * part // 8
        start = stop * start_part // 8
        name = self.pool(number)
        self.model.remove(self.tree.detach(self.tree.span(match, start, stop), tier, [name]))
        assert not any(key in self.model.slots[tier][name] for key in keys[start:stop])
        self.detached.update(keys[start:stop])

    @precondition(lambda self: len(self.known) % 30 == 29)
    @rule(namespace=st.sampled_from((None, *NAMESPACES)))
    def flush(self, namespace: bytes | None) -> None:
        gone = self.model.remove(self.tree.flush(namespace))
        self.model.assert_pins_held(gone)
        if not self.model.pins:
            assert not [key for key in self.model.resident() if namespace in (None, key[0])]

    # Always

    @invariant()
    def same_slots(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        assert self.tree.pins_total() == len(self.model.pins)
        for tier in TIERS:
            for name in self.names:
                assert sorted(self.tree.resident(name, tier)) == sorted(self.model.slots[tier][name].values())
        self.model.assert_together()
        self.model.assert_carried(self.detached)

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        for receipt in self.receipts + [backup.receipt for backup in self.backups]:
            self.tree.unpin(receipt)
        for _ in range(2):
            for name in self.names:
                for tier in TIERS:
                    self.tree.evict(name, tier, 1_000_000, drop_dirty=True)
                    self.tree.check()
        assert self.tree.nodes == 0
        assert all(self.tree.evictable(name, tier) == 0 for name in self.names for tier in TIERS)


TestTreeMachine = TreeMachine.TestCase
