"""What every storage backend must hold to: subclass `StorageBackendConformance` in a test module, pytest runs it."""

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np

from hicache.errors import ClosedError
from hicache.storage import Cleared, PageStore, StorageBackend, StorageKey, chain_keys
from hicache.storage.chains import entry_id
from hicache.storage.codec import pool_digest
from hicache.storage.listing import ListsValues
from hicache.storage.protocol import RegistersMemory

SAMPLE_NAMESPACE = sha256(b"sample namespace").digest()


def sample_chain(
    count: int, *, pool: str = "kv", chain: str = "a", namespace: bytes = SAMPLE_NAMESPACE
) -> list[StorageKey]:
    """The keys of a chain of `count` pages; another `chain` is another one from the first page on."""
    pages = b"".join(sha256(f"{chain} {i}".encode()).digest() for i in range(count))
    return chain_keys(namespace, pool, namespace, pages)


def sample_value(key: StorageKey, size_bytes: int) -> bytes:
    """Bytes that only this key has."""
    source = np.random.default_rng(list(sha256(key.namespace + key.page + pool_digest(key.pool)).digest()))
    return source.bytes(size_bytes)


def put(backend: StorageBackend, key: StorageKey, value: bytes) -> bool:
    """Writes one value in one part."""
    return bool(backend.write([key], [[memoryview(value)]])[0])


def get(backend: StorageBackend, key: StorageKey, size_bytes: int) -> bytes | None:
    """Reads one value of this size in one part; None unless it is ok."""
    buffer = bytearray(size_bytes)
    result = backend.read([key], [[memoryview(buffer)]])
    return bytes(buffer) if result.ok[0] else None


class StorageBackendConformance:
    """Give `make_backend`; say whether values outlive `close`. Every test begins with an empty store."""

    persistent: bool = True
    """Whether a second `make_backend` in the same folder finds what the first one stored."""
    shared: bool = False
    """Whether two that are open at a time have the same values. If so, it is tested."""
    straight: bool = False
    """Whether bytes move from and into (registered) buffers without a copy in Python's memory. If so, it is tested."""

    lists: bool = False
    """Whether it can say what it holds (`ListsValues`). If so, it is tested."""

    def make_backend(self, folder: Path) -> StorageBackend:
        """Opens the backend under test; `folder` is an empty folder of the test, or the same one again."""
        raise NotImplementedError("a conformance suite needs a backend")

    @contextmanager
    def opened(self, folder: Path) -> Iterator[StorageBackend]:
        """The backend, closed at the end."""
        backend = self.make_backend(folder)
        try:
            yield backend
        finally:
            backend.close()

    def test_an_empty_store_has_nothing(self, tmp_path: Path) -> None:
        """Nothing is there, read or deleted, and none of that is a failure."""
        keys = sample_chain(3)
        with self.opened(tmp_path) as backend:
            assert backend.contains(keys).tolist() == [False] * 3
            assert backend.delete(keys).tolist() == [False] * 3
            result = backend.read(keys, [[memoryview(bytearray(8))] for _ in keys])
            assert not (result.ok | result.damaged | result.failed).any()
            assert backend.health() == ()

    def test_calls_without_pages(self, tmp_path: Path) -> None:
        """No keys, no answers."""
        with self.opened(tmp_path) as backend:
            assert len(backend.contains([])) == len(backend.read([], []).ok) == 0
            assert len(backend.write([], [])) == len(backend.delete([])) == 0

    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        """Bytes come back whatever their number."""
        sizes = [1, 7, 511, 4096, 4097, 1_000_003]
        keys = sample_chain(len(sizes))
        values = [sample_value(key, size) for key, size in zip(keys, sizes, strict=True)]
        with self.opened(tmp_path) as backend:
            assert backend.write(keys, [[memoryview(value)] for value in values]).all()
            assert backend.contains(keys).all()
            for key, value in zip(keys, values, strict=True):
                assert get(backend, key, len(value)) == value

    def test_parts_are_gathered_and_scattered(self, tmp_path: Path) -> None:
        """A value is its bytes, not how they were cut; empty parts count for nothing."""
        [key] = sample_chain(1)
        value = sample_value(key, 10_000)
        with self.opened(tmp_path) as backend:
            assert backend.write([key], [_cut(memoryview(value), [0, 3, 3, 5_000, 10_000])]).all()
            buffer = bytearray(len(value))
            assert backend.read([key], [_cut(memoryview(buffer), [0, 256, 9_999, 10_000])]).ok.all()
            assert buffer == value

    def test_answers_are_per_page(self, tmp_path: Path) -> None:
        """One batch, some pages there and some not."""
        keys = sample_chain(6)
        with self.opened(tmp_path) as backend:
            for key in keys[::2]:
                assert put(backend, key, sample_value(key, 100))
            assert backend.contains(keys).tolist() == [True, False] * 3
            buffers = [bytearray(100) for _ in keys]
            result = backend.read(keys, [[memoryview(buffer)] for buffer in buffers])
            assert result.ok.tolist() == [True, False] * 3
            for key, buffer in list(zip(keys, buffers, strict=True))[::2]:
                assert bytes(buffer) == sample_value(key, 100)
            assert backend.delete(keys).tolist() == [True, False] * 3
            assert not backend.contains(keys).any()

    def test_a_later_value_takes_the_place_of_an_earlier_one(self, tmp_path: Path) -> None:
        """Also one of another length."""
        [key] = sample_chain(1)
        with self.opened(tmp_path) as backend:
            for value in (b"first", b"other", b"a longer one", b"x"):
                assert put(backend, key, value)
                assert get(backend, key, len(value)) == value

    def test_a_value_of_another_length_is_damaged(self, tmp_path: Path) -> None:
        """Longer or shorter: not ok, not there any more, and there again once it is written."""
        [key] = sample_chain(1)
        with self.opened(tmp_path) as backend:
            for size_bytes in (99, 101, 1, 10_000):
                assert put(backend, key, b"v" * 100)
                result = backend.read([key], [[memoryview(bytearray(size_bytes))]])
                assert (result.ok[0], result.damaged[0], result.failed[0]) == (False, True, False)
                assert not backend.contains([key])[0]
                assert get(backend, key, 100) is None
            assert put(backend, key, b"v" * 100)
            assert get(backend, key, 100) == b"v" * 100

    def test_every_part_of_a_key_counts(self, tmp_path: Path) -> None:
        """Another namespace, pool or page is another value."""
        other = sha256(b"another namespace").digest()
        keys = [
            *sample_chain(2),
            *sample_chain(2, pool="state"),
            *sample_chain(2, chain="b"),
            *sample_chain(2, namespace=other),
        ]
        with self.opened(tmp_path) as backend:
            for i, key in enumerate(keys):
                assert not backend.contains([key])[0]
                assert put(backend, key, b"%08d" % i)
            for i, key in enumerate(keys):
                assert get(backend, key, 8) == b"%08d" % i

    def test_names_of_pools_are_only_names(self, tmp_path: Path) -> None:
        """Whatever a pool is called, its pages are apart and stay in the store."""
        pools = ["", "../../x", "/etc/x", "a\0b", "p" * 300, "kv/0", "KV", "kv", "ключ", "con"]
        keys = [sample_chain(1, pool=pool)[0] for pool in pools]
        with self.opened(tmp_path) as backend:
            assert backend.write(keys, [[memoryview(sample_value(key, 50))] for key in keys]).all()
            for key in keys:
                assert get(backend, key, 50) == sample_value(key, 50)

    def test_one_key_twice_in_a_batch(self, tmp_path: Path) -> None:
        """One of the two values is there, whole."""
        [key] = sample_chain(1)
        with self.opened(tmp_path) as backend:
            assert backend.write([key, key], [[memoryview(b"one")], [memoryview(b"two")]]).all()
            assert get(backend, key, 3) in (b"one", b"two")
            assert backend.delete([key, key]).sum() == 1

    def test_values_are_whole_while_others_write(self, tmp_path: Path) -> None:
        """Threads write, read and delete the same pages: what is ok is one writer's value, never a mix."""
        keys, size_bytes, mixed = sample_chain(3), 50_000, []
        with self.opened(tmp_path) as backend:

            def write(letter: bytes) -> None:
                for _ in range(20):
                    backend.write(keys, [[memoryview(letter * size_bytes)] for _ in keys])

            def read() -> None:
                for _ in range(40):
                    for key in keys:
                        value = get(backend, key, size_bytes)
                        if value is not None and value != value[:1] * size_bytes:
                            mixed.append(value)

            def delete() -> None:
                for _ in range(20):
                    backend.delete(keys)

            _run_together([lambda: write(b"a"), lambda: write(b"b"), read, delete])
            assert not mixed
            assert backend.write(keys, [[memoryview(b"c" * size_bytes)] for _ in keys]).all()
            assert backend.contains(keys).all()

    def test_clearing_takes_one_namespace(self, tmp_path: Path) -> None:
        """Every pool and chain of it goes and is counted, nothing of another does, and it can be written again."""
        other = sha256(b"another namespace").digest()
        ours = [*sample_chain(3), *sample_chain(2, pool="state"), *sample_chain(2, chain="b")]
        theirs = sample_chain(3, namespace=other)
        with self.opened(tmp_path) as backend:
            assert backend.clear(SAMPLE_NAMESPACE).pages == 0
            assert backend.write([*ours, *theirs], [[memoryview(b"x" * 100)]] * 10).all()
            cleared = backend.clear(SAMPLE_NAMESPACE)
            assert (cleared.pages, cleared.size_bytes, cleared.left_pages) == (7, 700, 0)
            assert not backend.contains(ours).any()
            assert [get(backend, key, 100) for key in ours] == [None] * 7
            assert [get(backend, key, 100) for key in theirs] == [b"x" * 100] * 3
            assert backend.clear(SAMPLE_NAMESPACE).pages == 0
            assert put(backend, ours[0], b"again")
            assert get(backend, ours[0], 5) == b"again"

    def test_it_carries_pages(self, tmp_path: Path) -> None:
        """PageStore on top: any contiguous memory goes in and comes back."""
        keys = sample_chain(4)
        pages = np.arange(4 * 1000, dtype=np.float32).reshape(4, 1000)
        back = np.zeros_like(pages)
        store = PageStore(self.make_backend(tmp_path))
        try:
            assert store.write(keys, [page.data for page in pages]).all()
            assert store.read(keys, [page.data for page in back]).ok.all()
            assert np.array_equal(pages, back)
        finally:
            store.close()

    def test_after_close_it_says_so(self, tmp_path: Path) -> None:
        """Each call raises ClosedError; closing again does nothing."""
        backend = self.make_backend(tmp_path)
        backend.close()
        backend.close()
        keys = sample_chain(1)
        buffers = [[memoryview(bytearray(1))]]
        for call in (
            lambda: backend.contains(keys),
            lambda: backend.read(keys, buffers),
            lambda: backend.write(keys, buffers),
            lambda: backend.delete(keys),
            lambda: backend.clear(SAMPLE_NAMESPACE),
        ):
            try:
                call()
            except ClosedError:
                continue
            raise AssertionError("a closed backend answered")

    def test_values_outlive_close(self, tmp_path: Path) -> None:
        """A persistent backend that is opened again has what it had."""
        keys = sample_chain(3)
        with self.opened(tmp_path) as backend:
            assert backend.write(keys, [[memoryview(sample_value(key, 1000))] for key in keys]).all()
        with self.opened(tmp_path) as backend:
            assert backend.contains(keys).tolist() == [self.persistent] * 3
            for key in keys:
                assert get(backend, key, 1000) == (sample_value(key, 1000) if self.persistent else None)

    def test_two_that_are_open_share_their_values(self, tmp_path: Path) -> None:
        """What one stores, replaces or deletes is so for the other."""
        if not self.shared:
            return
        keys = sample_chain(2)
        with self.opened(tmp_path) as one, self.opened(tmp_path) as other:
            assert put(one, keys[0], b"first")
            assert put(other, keys[1], b"value")
            assert one.contains(keys).all() and other.contains(keys).all()
            assert get(other, keys[0], 5) == b"first"
            assert put(other, keys[0], b"another")
            assert get(one, keys[0], 7) == b"another"
            assert one.delete(keys).all()
            assert not other.contains(keys).any()
            assert [get(other, key, 5) for key in keys] == [None, None]

    def test_it_lists_what_it_holds(self, tmp_path: Path) -> None:
        """Every value, in whatever pool, with its size; looked at and removed one by one, whoever wrote it."""
        keys = [*sample_chain(3), *sample_chain(2, pool="state"), *sample_chain(1, chain="b")]
        with self.opened(tmp_path) as backend:
            assert isinstance(backend, ListsValues) == self.lists
            if not isinstance(backend, ListsValues):
                return
            assert list(backend.values()) == []
            for i, key in enumerate(keys):
                assert put(backend, key, sample_value(key, 100 + i))
            found = {value.entry: value for value in backend.values()}
            assert {entry: value.size_bytes for entry, value in found.items()} == {
                entry_id(key): 100 + i for i, key in enumerate(keys)
            }
            assert 600 <= sum(value.size_bytes for value in found.values()) <= backend.taken_bytes()
            values = [found[entry_id(key)] for key in keys]
            buffers = [memoryview(bytearray(value.size_bytes)) for value in values]
            assert backend.look(values, buffers).ok.all()
            assert [bytes(one) for one in buffers] == [sample_value(key, 100 + i) for i, key in enumerate(keys)]
            assert backend.remove([values[2], values[2], values[3]]) == Cleared(2, 102 + 103)
            assert backend.contains(keys).tolist() == [True, True, False, False, True, True]
            gone = backend.look(values[2:3], buffers[2:3])
            assert not (gone.ok | gone.damaged | gone.failed).any()
            assert backend.reclaim() == 0
            backend.trim(0)
            assert list(backend.values()) == [] and not backend.contains(keys).any()

    def test_descriptions_go_with_their_namespace(self, tmp_path: Path) -> None:
        """The first text stays; clearing one namespace takes its text and no other."""
        other = sha256(b"another namespace").digest()
        with self.opened(tmp_path) as backend:
            if not isinstance(backend, ListsValues):
                return
            for namespace, text in ((SAMPLE_NAMESPACE, "one"), (other, "two \u00e9"), (other, "three")):
                backend.describe(namespace, text)
            assert dict(backend.descriptions()) == {SAMPLE_NAMESPACE: "one", other: "two \u00e9"}
            backend.clear(SAMPLE_NAMESPACE)
            assert dict(backend.descriptions()) == {other: "two \u00e9"}

    def test_bytes_move_straight(self, tmp_path: Path) -> None:
        """Storing and fetching 8 MiB takes no block of memory of that order, once host memory is registered."""
        if not self.straight:
            return
        [key] = sample_chain(1)
        host = np.frombuffer(sample_value(key, 8 << 20), np.uint8).copy()
        back = np.zeros_like(host)
        with self.opened(tmp_path) as backend:
            if isinstance(backend, RegistersMemory):
                backend.register([host.data, back.data])
            assert put(backend, key, b"warm") and get(backend, key, 4) == b"warm" and backend.delete([key])[0]
            tracemalloc.start()
            try:
                assert backend.write([key], [[host.data]])[0]
                assert backend.read([key], [[back.data]]).ok[0]
                _, most_bytes = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert np.array_equal(host, back)
            assert most_bytes < 1 << 20


def _cut(view: memoryview, bounds: Sequence[int]) -> list[memoryview]:
    return [view[start:stop] for start, stop in pairwise(bounds)]


def _run_together(jobs: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(jobs)) as threads:
        for ended in [threads.submit(job) for job in jobs]:
            ended.result()
