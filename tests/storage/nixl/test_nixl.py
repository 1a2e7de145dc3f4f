"""A folder that NIXL reads and writes holds to the protocol; what is wrong with its files is a miss."""

import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nixl_cu12", reason="the nixl-posix store is not installed: pip install --no-deps nixl-cu12")

from hicache.errors import ConfigError, StorageError
from hicache.storage import PageStore, StorageBackend, open_store
from hicache.storage.nixl.backend import NixlPosixBackend
from hicache.storage.nixl.engine import Engine
from hicache.testing.storage import StorageBackendConformance, sample_chain
from tests.storage.promises import PROMISES
from tests.storage.support import files_below, load_pages, store_pages


class TestNixlPosix(StorageBackendConformance):
    persistent = PROMISES["nixl-posix"].outlives_close
    shared = PROMISES["nixl-posix"].shared
    straight = PROMISES["nixl-posix"].straight

    def make_backend(self, folder: Path) -> StorageBackend:
        return open_store(f"nixl-posix:{folder}/store")


class TestNixlPosixWithoutUring(StorageBackendConformance):
    def make_backend(self, folder: Path) -> StorageBackend:
        return open_store(f"nixl-posix:{folder}/store?queue=posix")


def open_pages(folder: Path) -> PageStore:
    return PageStore(open_store(f"nixl-posix:{folder}/store"))


def engine_of(store: PageStore) -> Engine:
    assert isinstance(store.backend, NixlPosixBackend)
    return store.backend._engine


def page_files(folder: Path) -> list[Path]:
    return files_below(folder / "store" / "hicache")


def test_every_flip_and_every_cut_is_a_miss_and_the_page_is_written_anew(tmp_path: Path):
    [key] = sample_chain(1)
    store = open_pages(tmp_path)
    assert store_pages(store, [key], 40) == [True]
    [path] = page_files(tmp_path)
    good = path.read_bytes()
    flips = [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(0, len(good), 5)]
    for wrong in [*flips, *(good[:i] for i in range(0, len(good), 13)), good + b"x"]:
        path.write_bytes(wrong)
        assert load_pages(store, [key], 40) == [False]
        assert not store.contains([key])[0]
    assert store_pages(store, [key], 40) == [True]
    assert load_pages(store, [key], 40) == [True]
    store.close()


def test_registered_memory_is_read_and_written_in_place(tmp_path: Path, monkeypatch):
    keys = sample_chain(150)
    host = np.random.default_rng(0).integers(0, 256, (150, 5000), dtype=np.uint8)
    back = np.zeros_like(host)
    store = open_pages(tmp_path)
    store.register([host.data, back.data])
    assert store.write(keys, [row.data for row in host]).all()
    assert store.read(keys, [row.data for row in back]).ok.all()
    assert np.array_equal(host, back)
    store.close()


def test_files_are_private_and_what_was_left_half_written_is_reclaimed(tmp_path: Path):
    store = open_pages(tmp_path)
    store_pages(store, sample_chain(2))
    store.close()
    assert {path.stat().st_mode & 0o777 for path in page_files(tmp_path)} == {0o600}
    folders = [path for path in (tmp_path / "store").rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    old, new = tmp_path / "store/tmp/old", tmp_path / "store/tmp/new"
    for temp in (old, new):
        temp.write_bytes(b"half")
    os.utime(old, (1, 1))
    open_pages(tmp_path).close()
    assert not old.exists() and new.exists()


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch):
    keys = sample_chain(3)
    store = open_pages(tmp_path)

    def full(file: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        assert store_pages(store, keys) == [False] * 3
        assert "No space left on device" in store.health()[0]
    assert files_below(tmp_path / "store") == []
    assert store_pages(store, keys) == [True] * 3
    assert store.health() == ()
    with monkeypatch.context() as patch:
        patch.setattr(engine_of(store), "read", lambda files, values: False)
        assert load_pages(store, keys) == [False] * 3
        assert store.stats().read_failed_pages == 3 and store.health()
    assert load_pages(store, keys) == [True] * 3
    store.close()


def test_one_file_that_fails_does_not_take_others_along(tmp_path: Path, monkeypatch):
    keys = sample_chain(3)
    store = open_pages(tmp_path)
    store_pages(store, keys)
    engine = engine_of(store)
    read = engine.read
    calls = []

    def fail_together(files, values):
        calls.append(len(files))
        return len(calls) > 2 and read(files, values)

    monkeypatch.setattr(engine, "read", fail_together)
    assert load_pages(store, keys) == [False, True, True]
    assert calls == [3, 1, 1, 1]
    store.close()


def test_what_can_not_be_used(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot use this folder"):
        open_store(f"nixl-posix:{tmp_path}/file/store")
    with pytest.raises(ConfigError, match="names no folder"):
        open_store("nixl-posix:")
    with pytest.raises(ConfigError, match="say uring, aio, posix"):
        open_store("nixl-posix:x?queue=fast")
