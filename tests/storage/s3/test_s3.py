"""A bucket of an S3 server holds to the protocol; a server in trouble makes misses, never wrong bytes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.errors import ConfigError, StorageError
from hicache.storage import PageStore, StorageBackend, open_store
from hicache.storage.names import value_name
from hicache.testing.storage import StorageBackendConformance, put, sample_chain
from tests.storage.engines import Engine
from tests.storage.promises import PROMISES
from tests.storage.s3.seaweed import SeaweedServer, obstore
from tests.storage.support import load_pages, store_pages
from tests.storage.trouble import EngineTrouble


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    server = SeaweedServer(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


class TestS3(StorageBackendConformance):
    persistent = PROMISES["s3"].outlives_close
    shared = PROMISES["s3"].shared
    straight = PROMISES["s3"].straight

    @pytest.fixture(autouse=True)
    def _server(self, server: SeaweedServer) -> None:
        self.server = server

    def make_backend(self, folder: Path) -> StorageBackend:
        return open_store(self.server.url(f"/{folder.name}/"), timeout=60)


class TestS3Trouble(EngineTrouble):
    """All tests share a server, each with a prefix of its own; those that start it anew take long."""

    keeps_values = PROMISES["s3"].outlives_kill
    flip_stride = 7

    @pytest.fixture
    def engine(self, server: SeaweedServer) -> Engine:
        return server

    @pytest.fixture(autouse=True)
    def _server(self, server: SeaweedServer, tmp_path: Path) -> None:
        self.server, self.prefix = server, tmp_path.name

    def open(self, port: int, timeout_s: float = 30.0) -> StorageBackend:
        return open_store(self.server.url(self.prefix, port), timeout=timeout_s)

    @pytest.mark.full
    def test_a_killed_engine_that_comes_back(self, engine: Engine):
        super().test_a_killed_engine_that_comes_back(engine)

    @pytest.mark.full
    def test_an_engine_that_is_killed_between_two_calls_is_not_noticed(self, engine: Engine):
        super().test_an_engine_that_is_killed_between_two_calls_is_not_noticed(engine)

    @pytest.mark.full
    def test_an_engine_that_is_not_there_yet(self, engine: Engine):
        super().test_an_engine_that_is_not_there_yet(engine)


def test_what_others_put_there_is_left_alone_and_is_a_miss(server: SeaweedServer):
    keys = sample_chain(3)
    bucket = server.store()
    store = PageStore(open_store(server.url("mixed")))
    assert all(store_pages(store, keys))
    obstore.put(bucket, "mixed/notes.txt", b"mine")
    obstore.put(bucket, "mixed/hicache/9/other", b"of a later version")
    obstore.put(bucket, f"mixed/{value_name(keys[0])}", b"")
    obstore.put(bucket, f"mixed/{value_name(keys[1])}", b"x" * 5_000_000)
    assert load_pages(store, keys) == [False, False, True]
    assert store.stats().damaged_pages == 2
    assert store.contains(keys).tolist() == [False, False, True]
    assert store.clear(keys[0].namespace).pages == 1
    left = [item["path"] for chunk in obstore.list(bucket, "mixed") for item in chunk]
    assert sorted(left) == ["mixed/hicache/9/other", "mixed/notes.txt"]
    store.close()


def test_only_as_many_bytes_as_a_page_has_are_asked_for(server: SeaweedServer, monkeypatch):
    [key] = sample_chain(1)
    backend = open_store(server.url("ranged"), timeout=60)
    assert put(backend, key, b"x" * 100)
    asked, get = [], obstore.get

    def note(store, name, options):
        asked.append(options)
        return get(store, name, options=options)

    monkeypatch.setattr(obstore, "get", note)
    assert backend.read([key], [[memoryview(bytearray(10)), memoryview(bytearray(20))]]).damaged.all()
    assert asked == [{"range": (0, 30)}]
    backend.close()


def test_what_is_wrong_for_good_is_said_at_the_start(server: SeaweedServer):
    with pytest.raises(StorageError, match="there is no such bucket"):
        open_store(server.url("").replace("s3://pages", "s3://no-such-bucket"))
    with pytest.raises(StorageError, match="403") as refusal:
        open_store(server.url("").replace(server.SECRET, "guess-of-mine"))
    assert "guess-of-mine" not in str(refusal.value)


def test_credentials_come_from_the_environment(server: SeaweedServer, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    store = open_store("s3://pages/from-environment")
    assert put(store, sample_chain(1)[0], b"value")
    store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3:", "names a bucket"),
        ("s3:///prefix", "names a bucket"),
        ("s3://b?cap=1GiB", "no option 'cap'"),
        ("s3://b?connections=0", "connections='0': give a whole number"),
        ("s3://b?timeout=-1", "give seconds"),
    ],
)
def test_a_wrong_url(url: str, message: str):
    with pytest.raises(ConfigError, match=message):
        open_store(url)
