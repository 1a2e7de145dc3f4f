"""One server, and a cluster of three, hold to the protocol."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.storage import StorageBackend, open_store
from hicache.testing.storage import StorageBackendConformance
from tests.storage.engines import ValkeyServer
from tests.storage.promises import PROMISES
from tests.storage.valkey.clusters import ClusterServers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    cluster = ClusterServers(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.kill()


class TestValkey(StorageBackendConformance):
    persistent = PROMISES["valkey"].outlives_close
    shared = PROMISES["valkey"].shared
    straight = PROMISES["valkey"].straight

    @pytest.fixture(autouse=True)
    def _empty(self, server: ValkeyServer) -> None:
        assert server.call("FLUSHALL") == b"OK"
        self.port = server.port

    def make_backend(self, folder: Path) -> StorageBackend:
        return open_store(f"valkey://127.0.0.1:{self.port}/1")


class TestValkeyCluster(StorageBackendConformance):
    persistent = PROMISES["valkey"].outlives_close
    shared = PROMISES["valkey"].shared
    straight = PROMISES["valkey"].straight

    @pytest.fixture(autouse=True)
    def _empty(self, cluster: ClusterServers) -> None:
        cluster.flush()
        self.port = cluster.servers[0].port

    def make_backend(self, folder: Path) -> StorageBackend:
        return open_store(f"valkey://127.0.0.1:{self.port}?cluster=yes")
