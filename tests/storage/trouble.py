"""What a page store on an engine elsewhere must hold to while that engine is damaged, stuck, dead, or back again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.errors import StorageError
from hicache.storage import PageStore, StorageBackend
from hicache.storage.codec import encode_header
from hicache.testing.storage import put, sample_chain
from tests.storage.engines import Engine, free_port, wait_until
from tests.storage.proxy import Relay
from tests.storage.support import load_pages, page, store_pages

SMALL_BYTES = 40


class EngineTrouble:
    """Give an engine and how it is opened. Each test has an engine of its own, and an empty store."""

    keeps_values = False
    """Whether values are still there when the engine was killed and started again."""
    flip_stride = 1
    pages_pass_the_port = True
    call_s = 0.5
    """Calls that are to run into their timeout get this much; others much more."""

    def start(self, folder: Path) -> Engine:
        raise NotImplementedError

    def open(self, port: int, timeout_s: float = 30.0) -> StorageBackend:
        raise NotImplementedError

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[Engine]:
        engine = self.start(tmp_path)
        yield engine
        engine.kill()

    def test_a_flipped_byte_is_a_miss_and_the_page_is_written_anew(self, engine: Engine):
        [key] = sample_chain(1)
        good = page(key, SMALL_BYTES)
        value = encode_header(key, good) + good
        store = PageStore(self.open(engine.ports[0]))
        for at in range(0, len(value), self.flip_stride):
            wrong = bytearray(value)
            wrong[at] ^= 1
            assert store.backend.write([key], [[memoryview(wrong)]]).all()
            assert load_pages(store, [key], SMALL_BYTES) == [False]
            assert store.stats().damaged_pages == at // self.flip_stride + 1
            assert not store.contains([key])[0]
        assert store_pages(store, [key], SMALL_BYTES) == [True]
        assert load_pages(store, [key], SMALL_BYTES) == [True]
        store.close()

    def test_a_value_cut_anywhere_is_a_miss(self, engine: Engine):
        [key] = sample_chain(1)
        good = page(key, SMALL_BYTES)
        value = encode_header(key, good) + good
        store = PageStore(self.open(engine.ports[0]))
        for size in range(1, len(value), 7 * self.flip_stride):
            assert store.backend.write([key], [[memoryview(value)[:size]]]).all()
            assert load_pages(store, [key], SMALL_BYTES) == [False]
            assert not store.contains([key])[0]
        store.close()

    def test_a_page_of_another_key_is_a_miss(self, engine: Engine):
        keys = [*sample_chain(1), *sample_chain(1, chain="b"), *sample_chain(1, pool="state")]
        store = PageStore(self.open(engine.ports[0]))
        for other in keys[1:]:
            foreign = page(other, SMALL_BYTES)
            assert store.backend.write(keys[:1], [[memoryview(encode_header(other, foreign)), foreign]]).all()
            assert load_pages(store, keys[:1], SMALL_BYTES) == [False]
        store.close()

    def test_a_blocked_engine_is_left_after_the_timeout_and_used_again(self, engine: Engine):
        keys = sample_chain(3)
        store = PageStore(self.open(engine.ports[0], self.call_s))
        assert all(store_pages(store, keys[:2]))
        engine.freeze()
        result = store.read(keys, [page(key) for key in keys])
        assert result.failed.all() and not result.ok.any()
        with pytest.raises(StorageError, match=r"in time|timed out"):
            store.contains(keys)
        assert not put(store.backend, keys[2], b"value")
        assert not store.delete(keys[2:]).any()
        assert len(store.health()) == 1
        engine.thaw()
        # What was asked meanwhile is answered late, to nobody: each page still gets its own bytes.
        wait_until(lambda: load_pages(store, keys[1::-1]) == [True, True], "an answer")
        assert store.stats().damaged_pages == 0
        assert store.health() == ()
        store.close()

    def test_a_killed_engine_that_comes_back(self, engine: Engine):
        keys = sample_chain(3)
        store = PageStore(self.open(engine.ports[0]))
        assert all(store_pages(store, keys))
        engine.kill()
        assert store.read(keys, [page(key) for key in keys]).failed.all()
        with pytest.raises(StorageError):
            store.contains(keys)
        [said] = store.health()
        assert str(engine.ports[0]) in said
        engine.start()
        assert store.contains(keys).tolist() == [self.keeps_values] * 3
        assert all(store_pages(store, keys))
        assert all(load_pages(store, keys))
        assert store.health() == ()
        store.close()

    def test_an_engine_that_is_killed_between_two_calls_is_not_noticed(self, engine: Engine):
        keys = sample_chain(2)
        store = PageStore(self.open(engine.ports[0]))
        store_pages(store, keys)
        engine.kill()
        engine.start()
        assert load_pages(store, keys) == [self.keeps_values] * 2
        assert store.stats().read_failed_pages == 0
        store.close()

    def test_an_engine_that_is_not_there_yet(self, engine: Engine):
        engine.kill()
        keys = sample_chain(2)
        store = PageStore(self.open(engine.ports[0]))
        assert len(store.health()) == 1
        assert store.read(keys, [page(key) for key in keys]).failed.all()
        engine.start()
        assert all(store_pages(store, keys))
        assert store.health() == ()
        store.close()

    def test_an_answer_that_breaks_off_anywhere(self, engine: Engine):
        if not self.pages_pass_the_port:
            pytest.skip("pages go elsewhere than through this port")
        relay = Relay(engine.ports[0])
        keys = sample_chain(4)
        store = PageStore(self.open(relay.port))
        assert all(store_pages(store, keys, 2000))
        whole = 0
        for answered in range(0, 11_000, 487):
            relay.cut()
            relay.answers_left = answered
            # Pages that arrived before the cut are whole; load_pages compares their bytes.
            whole += sum(load_pages(store, keys, 2000))
            assert store.stats().damaged_pages == 0
        assert whole > 0
        assert store.stats().read_failed_pages > 0
        relay.answers_left = None
        assert all(load_pages(store, keys, 2000))
        store.close()
        relay.close()

    def test_a_port_where_nobody_listens(self):
        keys = sample_chain(1)
        store = PageStore(self.open(free_port()))
        assert not store.backend.write(keys, [[page(keys[0])]]).any()
        assert len(store.health()) == 1
        store.close()
