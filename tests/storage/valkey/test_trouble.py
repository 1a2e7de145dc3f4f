"""A server that is damaged, stuck, dead or full makes misses, never wrong bytes."""

from pathlib import Path

import pytest

from hicache.errors import StorageError
from hicache.storage import PageStore, StorageBackend, open_store
from hicache.storage.names import value_name
from hicache.testing.storage import get, put, sample_chain
from tests.storage.engines import Engine, ValkeyServer
from tests.storage.promises import PROMISES
from tests.storage.proxy import Relay
from tests.storage.support import load_pages, store_pages
from tests.storage.trouble import EngineTrouble
from tests.storage.valkey.clusters import NODES, ClusterServers


class TestValkeyTrouble(EngineTrouble):
    keeps_values = PROMISES["valkey"].outlives_kill

    def start(self, folder: Path) -> Engine:
        return ValkeyServer(folder)

    def open(self, port: int, timeout_s: float = 30.0) -> StorageBackend:
        return open_store(f"valkey://127.0.0.1:{port}", timeout=timeout_s)


def test_a_full_server_refuses_and_says_so(tmp_path: Path):
    server = ValkeyServer(tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    keys = sample_chain(20)
    store = PageStore(open_store(f"redis://127.0.0.1:{server.port}"))
    stored = store_pages(store, keys, 1 << 20)
    assert stored[0] and not stored[-1]
    assert "OOM" in store.health()[0]
    assert load_pages(store, keys, 1 << 20) == stored
    store.close()
    server.kill()


def test_what_the_server_evicts_is_a_miss(tmp_path: Path):
    server = ValkeyServer(tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")
    keys = sample_chain(20)
    store = PageStore(open_store(f"valkey://127.0.0.1:{server.port}"))
    assert all(store_pages(store, keys, 1 << 20))
    there = store.contains(keys).tolist()
    assert not all(there) and any(there)
    assert load_pages(store, keys, 1 << 20) == there
    store.close()
    server.kill()


def test_values_go_after_their_time(tmp_path: Path):
    server = ValkeyServer(tmp_path)
    [key] = sample_chain(1)
    store = open_store(f"valkey://127.0.0.1:{server.port}?ttl=1000")
    assert put(store, key, b"value")
    left = server.call("TTL", value_name(key))
    assert isinstance(left, int) and 990 < left <= 1000
    store.close()
    server.kill()


def test_another_kind_of_thing_under_a_name_is_damage(tmp_path: Path):
    server = ValkeyServer(tmp_path)
    [key] = sample_chain(1)
    assert server.call("RPUSH", value_name(key), "x") == 1
    store = open_store(f"valkey://127.0.0.1:{server.port}")
    assert store.read([key], [[memoryview(bytearray(5))]]).damaged.all()
    assert not store.contains([key])[0]
    assert put(store, key, b"value")
    assert get(store, key, 5) == b"value"
    assert store.health() == ()
    store.close()
    server.kill()


def test_a_password_is_needed_and_never_said(tmp_path: Path, monkeypatch, caplog):
    server = ValkeyServer(tmp_path, "--requirepass", "sesame/@ street")
    place = f"127.0.0.1:{server.port}"
    with pytest.raises(StorageError, match="NOAUTH"):
        open_store(f"valkey://{place}")
    with pytest.raises(StorageError, match="WRONGPASS") as refusal:
        open_store(f"valkey://:wrong-one@{place}")
    assert "wrong-one" not in str(refusal.value)
    monkeypatch.setenv("THE_PASSWORD", "sesame/@ street")
    [key] = sample_chain(1)
    for url in (
        f"valkey://:sesame%2F%40%20street@{place}/1",
        f"valkey://default:sesame%2F%40%20street@{place}/1",
        f"valkey://{place}/1?password_env=THE_PASSWORD",
    ):
        store = open_store(url)
        assert put(store, key, b"value")
        assert get(store, key, 5) == b"value"
        server.freeze()
        store.close()
        server.thaw()
    assert "sesame" not in caplog.text
    server.kill()


def test_a_database_that_is_not_there(tmp_path: Path):
    server = ValkeyServer(tmp_path, "--databases", "2")
    with pytest.raises(StorageError, match="select its database"):
        open_store(f"valkey://127.0.0.1:{server.port}/7")
    server.kill()


def test_something_else_that_listens(tmp_path: Path):
    server = ValkeyServer(tmp_path)
    relay = Relay(server.port)
    store = open_store(f"valkey://127.0.0.1:{relay.port}")
    relay.close()
    server.kill()
    assert not put(store, sample_chain(1)[0], b"value")
    store.close()


def test_connections_are_kept(tmp_path: Path):
    server = ValkeyServer(tmp_path)
    relay = Relay(server.port)
    keys = sample_chain(4)
    store = PageStore(open_store(f"valkey://127.0.0.1:{relay.port}"))
    for _ in range(5):
        store_pages(store, keys)
        load_pages(store, keys)
        store.delete(keys)
    assert relay.connections == 1
    store.close()
    relay.close()
    server.kill()


def test_a_cluster_is_not_used_as_a_single_server_nor_the_other_way_round(tmp_path: Path):
    cluster = ClusterServers(tmp_path)
    keys = sample_chain(20)
    store = open_store(f"valkey://127.0.0.1:{cluster.servers[0].port}")
    assert not store.write(keys, [[memoryview(b"value")] for _ in keys]).all()
    assert "add cluster=yes" in store.health()[0]
    store.close()
    cluster.kill()
    server = ValkeyServer(tmp_path)
    with pytest.raises(StorageError, match="not a node of a cluster"):
        open_store(f"valkey://127.0.0.1:{server.port}?cluster=yes")
    server.kill()


def test_a_cluster_loses_a_node_and_gets_it_back(tmp_path: Path):
    cluster = ClusterServers(tmp_path)
    keys = sample_chain(60)
    seeds = ",".join(f"127.0.0.1:{server.port}" for server in cluster.servers)
    for server in cluster.servers:
        assert server.call("CONFIG", "SET", "cluster-require-full-coverage", "no") == b"OK"
    store = PageStore(open_store(f"valkey://{seeds}?cluster=yes"))
    assert all(store_pages(store, keys, 500))
    held = [server.call("DBSIZE") for server in cluster.servers]
    assert sum(n for n in held if isinstance(n, int)) == len(keys) and 0 not in held
    cluster.servers[0].kill()
    result = store.read(keys, [memoryview(bytearray(500)) for _ in keys])
    assert result.failed.sum() == held[0] and result.ok.sum() == len(keys) - result.failed.sum()
    assert len(store.health()) == 1
    cluster.servers[0].start()
    assert all(load_pages(store, [key for key, lost in zip(keys, result.failed, strict=True) if not lost], 500))
    store.close()
    cluster.kill()


def test_slots_move_between_nodes_while_they_are_used(tmp_path: Path):
    cluster = ClusterServers(tmp_path)
    [key] = sample_chain(1)
    store = PageStore(open_store(f"valkey://127.0.0.1:{cluster.servers[0].port}?cluster=yes"))
    assert store_pages(store, [key]) == [True]
    [source] = [server for server in cluster.servers if server.call("DBSIZE") == 1]
    target = cluster.servers[(cluster.servers.index(source) + 1) % NODES]
    slot = str(source.call("CLUSTER", "KEYSLOT", value_name(key)))
    ids = {}
    for server in cluster.servers:
        name = server.call("CLUSTER", "MYID")
        assert isinstance(name, bytes)
        ids[server.port] = name.decode()
    assert target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port]) == b"OK"
    assert source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port]) == b"OK"
    assert source.call("MIGRATE", "127.0.0.1", str(target.port), value_name(key), "0", "5000") == b"OK"
    assert load_pages(store, [key]) == [True]  # the old owner says ASK
    for server in (target, source):
        assert server.call("CLUSTER", "SETSLOT", slot, "NODE", ids[target.port]) == b"OK"
    assert load_pages(store, [key]) == [True]  # the old owner says MOVED
    assert store.contains([key])[0]
    assert store.health() == ()
    store.close()
    cluster.kill()
