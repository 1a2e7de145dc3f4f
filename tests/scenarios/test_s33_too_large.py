"""S33: an entry larger than the limit is refused, and nothing is evicted for it; sidecars count like all others."""

from pathlib import Path

import pytest

from hicache.storage import PageStore, StorageBackend
from hicache.storage.file import FileBackend
from hicache.storage.memory import MemoryBackend
from hicache.testing.storage import sample_chain
from tests.storage.support import load_pages, store_pages, value_bytes

CAP_BYTES = 28 * 4096


@pytest.fixture(params=["file", "memory"])
def backend(request, tmp_path: Path) -> StorageBackend:
    return FileBackend(tmp_path, CAP_BYTES) if request.param == "file" else MemoryBackend(CAP_BYTES)


def used_bytes(backend: StorageBackend) -> int:
    assert isinstance(backend, FileBackend | MemoryBackend)
    if isinstance(backend, FileBackend):
        assert backend.used_bytes == value_bytes(backend.root)
    return backend.used_bytes


def test_an_entry_larger_than_the_limit_is_refused_and_costs_nothing(backend: StorageBackend):
    store = PageStore(backend)
    small = sample_chain(9)
    store_pages(store, small, 10_000)
    before = used_bytes(backend)
    assert store_pages(store, sample_chain(1, chain="large"), 250_000) == [False]
    assert store_pages(store, sample_chain(1, chain="large"), CAP_BYTES - 255) == [False]
    assert load_pages(store, small, 10_000) == [True] * 9
    assert used_bytes(backend) == before
    assert store.stats().write_failed_pages == 2
    assert store_pages(store, sample_chain(1, chain="fits"), CAP_BYTES - 256) == [True]
    assert used_bytes(backend) == CAP_BYTES
    store.close()


def test_sidecars_count(backend: StorageBackend):
    store = PageStore(backend)
    for i in range(10):
        for pool, size_bytes in (("kv", 8_000), ("state", 12_000), ("indexer", 500)):
            store_pages(store, sample_chain(3, chain=str(i), pool=pool), size_bytes)
            assert used_bytes(backend) <= CAP_BYTES
    assert used_bytes(backend) > CAP_BYTES // 2
    store.close()
