"""A Mooncake Store of two processes holds to the protocol; run by test_mooncake.py."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache.errors import ConfigError
from hicache.storage import PageStore, StorageBackend, open_store
from hicache.storage.mooncake.backend import MooncakeBackend
from hicache.storage.remote import Deadline
from hicache.testing.storage import StorageBackendConformance, sample_chain
from tests.engine.tiny import write_checkpoint
from tests.server.stored import check_restart, given
from tests.storage.engines import Engine
from tests.storage.mooncake.servers import MooncakeServers
from tests.storage.promises import PROMISES
from tests.storage.support import load_pages, store_pages
from tests.storage.trouble import EngineTrouble


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServers]:
    servers = MooncakeServers(tmp_path_factory.mktemp("mooncake"))
    yield servers
    servers.kill()


class TestMooncake(StorageBackendConformance):
    persistent = PROMISES["mooncake"].outlives_close
    shared = PROMISES["mooncake"].shared
    straight = PROMISES["mooncake"].straight

    @pytest.fixture(autouse=True)
    def _empty(self, servers: MooncakeServers) -> None:
        self.port = servers.port
        backend = open_store(f"mooncake://127.0.0.1:{self.port}")
        assert isinstance(backend, MooncakeBackend)
        backend._client.connected(Deadline(30.0)).remove_all(True)
        backend.close()

    def make_backend(self, folder: Path) -> StorageBackend:
        return open_store(f"mooncake://127.0.0.1:{self.port}", timeout=60)


class TestMooncakeTrouble(EngineTrouble):
    keeps_values = PROMISES["mooncake"].outlives_kill
    flip_stride = 7
    pages_pass_the_port = False
    call_s = 5.0

    def start(self, folder: Path) -> Engine:
        return MooncakeServers(folder)

    def open(self, port: int, timeout_s: float = 10.0) -> StorageBackend:
        return open_store(f"mooncake://127.0.0.1:{port}", timeout=timeout_s)


def test_pages_move_straight_between_registered_memory_and_another_process(servers: MooncakeServers):
    keys = sample_chain(8, chain="straight")
    host = np.random.default_rng(0).integers(0, 256, (8, 100_000), dtype=np.uint8)
    back = np.zeros_like(host)
    store = PageStore(open_store(f"mooncake://127.0.0.1:{servers.port}", timeout=30))
    store.register([host.data, back.data])
    assert store.write(keys, [row.data for row in host]).all()
    assert store.read(keys, [row.data for row in back]).ok.all()
    assert np.array_equal(host, back)
    store.close()


def test_a_full_store_drops_what_was_not_used_for_long_or_refuses(servers: MooncakeServers):
    keys = sample_chain(90, chain="many")
    store = PageStore(open_store(f"mooncake://127.0.0.1:{servers.port}", timeout=30))
    stored = store_pages(store, keys, 1 << 20)
    assert stored[0] and not all(load_pages(store, keys, 1 << 20))
    assert not all(stored) or not store.contains(keys).all()
    store.close()


def test_a_holder_that_dies_takes_its_pages_along(tmp_path: Path):
    servers = MooncakeServers(tmp_path)
    keys = sample_chain(3, chain="lost")
    store = PageStore(open_store(f"mooncake://127.0.0.1:{servers.port}", timeout=30))
    assert all(store_pages(store, keys))
    servers.kill_owner()
    assert not any(load_pages(store, keys))
    store.close()
    servers.kill()


@pytest.mark.parametrize("url", ["mooncake:", "mooncake://h/x", "mooncake://h?segment=x", "mooncake://h?cap=1GiB"])
def test_a_wrong_url(url: str):
    with pytest.raises(ConfigError):
        open_store(url)


def test_a_server_is_warm_after_a_restart(servers: MooncakeServers, tmp_path: Path):
    checkpoint = write_checkpoint(tmp_path / "tiny")
    check_restart(given(checkpoint, tmp_path, f"mooncake://127.0.0.1:{servers.port}?timeout=20"))
