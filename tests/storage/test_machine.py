"""The store against a dict: whatever is written, damaged, deleted, evicted, refused by the disk or opened again."""

import errno
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache.storage import PageStore, StorageKey
from hicache.storage.chains import entry_id
from hicache.storage.file import FileBackend
from hicache.storage.file.records import State
from hicache.storage.file.slot_file import slot_size
from hicache.testing.storage import SAMPLE_NAMESPACE, sample_chain
from tests.storage.support import (
    FailingDisk,
    FakeClock,
    disk_bytes,
    find_spot,
    load_pages,
    records,
    spot,
    store_pages,
    value_bytes,
    writers,
)

SIZE_BYTES = 300
VALUE_BYTES = SIZE_BYTES + 256
SLOT_BYTES = slot_size(VALUE_BYTES)
CAP_PAGES = 9

CHAINS = {name: sample_chain(5, chain=name) for name in "abc"}
STATES = {name: sample_chain(5, chain=name, pool="state") for name in "abc"}
EVERY = [key for keys in [*CHAINS.values(), *STATES.values()] for key in keys]

chain_names = st.sampled_from(sorted(CHAINS))
any_key = st.sampled_from(EVERY)


class StoreMachine(RuleBasedStateMachine):
    """`damaged` are pages whose value is there and wrong; `owned` is who may answer: two stores share the folder."""

    @initialize(capped=st.booleans(), shared=st.booleans())
    def begin(self, capped: bool, shared: bool) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.cap_bytes = CAP_PAGES * SLOT_BYTES if capped else None
        self.clock, self.disk = FakeClock(), FailingDisk()
        self.stores = [self.open() for _ in range(2 if shared else 1)]
        self.given: set[StorageKey] = set()
        self.damaged: set[StorageKey] = set()

    def open(self) -> PageStore:
        return PageStore(FileBackend(self.root, self.cap_bytes, retry_s=1.0, disk=self.disk, clock_s=self.clock))

    def store(self, i: int) -> PageStore:
        return self.stores[i % len(self.stores)]

    def there(self, key: StorageKey) -> bool:
        return find_spot(self.root, key) is not None

    @rule(i=st.integers(0, 1), name=chain_names, count=st.integers(1, 5), states=st.booleans())
    def write(self, i: int, name: str, count: int, states: bool) -> None:
        keys = (STATES if states else CHAINS)[name][:count]
        missing = {key for key in keys if not self.store(i).contains([key])[0]}
        done = store_pages(self.store(i), keys, SIZE_BYTES)
        if self.cap_bytes is None and not self.disk.errors:
            assert all(done)
        for key, yes in zip(keys, done, strict=True):
            if yes and key in missing:
                assert self.there(key) or self.cap_bytes is not None
                self.damaged.discard(key)
            if yes:
                self.given.add(key)

    @rule(i=st.integers(0, 1), keys=st.lists(any_key, max_size=8, unique=True))
    def read(self, i: int, keys: list[StorageKey]) -> None:
        expected = [self.there(key) and key not in self.damaged and "read" not in self.disk.errors for key in keys]
        assert load_pages(self.store(i), keys, SIZE_BYTES) == expected

    @rule(i=st.integers(0, 1), key=any_key)
    def contains(self, i: int, key: StorageKey) -> None:
        if self.store(i).contains([key])[0]:
            assert self.there(key)
            assert spot(self.root, key).value_bytes == VALUE_BYTES

    @rule(i=st.integers(0, 1), key=any_key)
    def delete(self, i: int, key: StorageKey) -> None:
        was_there = self.there(key)
        assert self.store(i).delete([key])[0] == (was_there and "note" not in self.disk.errors)

    @rule(i=st.integers(0, 1))
    def clear(self, i: int) -> None:
        there = [key for key in EVERY if self.there(key)]
        cleared = self.store(i).clear(SAMPLE_NAMESPACE)
        if "note" in self.disk.errors and there:
            assert cleared.pages == 0
            assert not self.store(i).contains(EVERY).any()
        else:
            assert (cleared.pages, cleared.left_pages) == (len(there), 0)
            assert not any(self.there(key) for key in EVERY)

    @rule(key=any_key, how=st.sampled_from(["cut", "zeros", "flip"]), where=st.floats(0, 0.999))
    def damage(self, key: StorageKey, how: str, where: float) -> None:
        """A file that is cut loses all values behind as well."""
        found = find_spot(self.root, key)
        if found is None or key in self.damaged:
            return
        self.damaged.add(key)
        if how == "flip":
            found.flip(int(where * VALUE_BYTES), 4)
        elif how == "zeros":
            found.overwrite(bytes(VALUE_BYTES))
        else:
            found.cut(int(where * VALUE_BYTES))
            spots = {other: find_spot(self.root, other) for other in EVERY}
            self.damaged |= {other for other, its in spots.items() if its is not None and its.slot > found.slot}

    @rule(i=st.integers(0, 1))
    def reopen(self, i: int) -> None:
        self.store(i).close()
        self.stores[i % len(self.stores)] = self.open()

    @rule(call=st.sampled_from(["allocate", "write", "note", "read", "punch"]))
    def break_disk(self, call: str) -> None:
        self.disk.errors[call] = errno.EIO

    @precondition(lambda self: bool(self.disk.errors))
    @rule()
    def mend_disk(self) -> None:
        self.disk.errors.clear()
        self.clock.now_s += 2.0

    @precondition(lambda self: not self.disk.errors)
    @rule(name=chain_names)
    def everything_can_be_written_when_all_is_well(self, name: str) -> None:
        self.clock.now_s += 2.0
        keys = CHAINS[name]
        if not self.damaged and self.store(0).contains(keys).sum() == 0 and self.cap_bytes is None:
            assert store_pages(self.store(0), keys, SIZE_BYTES) == [True] * 5

    @invariant()
    def the_cap_holds(self) -> None:
        if self.cap_bytes is not None:
            assert value_bytes(self.root) <= self.cap_bytes
            assert disk_bytes(self.root) <= self.cap_bytes + 4096, "the file system may need a block to keep track"

    @invariant()
    def nothing_is_left_over(self) -> None:
        assert len(writers(self.root)) == len(self.stores)
        stored = [record.entry for record, _ in records(self.root).values() if record.state is State.STORED]
        assert len(stored) == len(set(stored))
        assert set(stored) <= {entry_id(key) for key in EVERY}

    def teardown(self) -> None:
        self.damaged.clear()
        for store in self.stores:
            store.close()
        shutil.rmtree(self.root)


assert len({entry_id(key) for key in EVERY}) == len(EVERY)

TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=settings().max_examples // 2)
