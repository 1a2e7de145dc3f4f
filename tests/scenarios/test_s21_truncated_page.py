"""S21 (storage): truncated pages are misses that look-ups learn of at once and that are written again."""

from pathlib import Path

import pytest

from hicache.storage import PageStore
from hicache.storage.file import FileBackend
from hicache.testing.storage import sample_chain
from tests.storage.support import load_pages, spot, store_pages


@pytest.mark.parametrize("left_bytes", [0, 1, 255, 256, 3000, 3255])
@pytest.mark.parametrize("looked_up_first", [False, True])
def test_a_truncated_page_ends_the_hit_and_comes_back(tmp_path: Path, left_bytes: int, looked_up_first: bool):
    keys = sample_chain(8)
    backend, other = FileBackend(tmp_path), FileBackend(tmp_path)
    store = PageStore(backend)
    store_pages(store, keys)
    spot(tmp_path, keys[3]).cut(left_bytes)
    if looked_up_first:
        assert store.contains(keys).tolist() == [True] * 3 + [False] * 5
    assert load_pages(store, keys) == [True] * 3 + [False] * 5
    assert store.stats().damaged_pages + store.stats().missed_pages == 5
    assert not store.contains(keys[3:4])[0], "the answer is fed back: nobody plans with this page again"
    assert not other.contains(keys[3:4])[0], "and other processes know"
    assert store_pages(store, keys) == [True] * 8
    assert store.stats().written_pages == 13
    assert load_pages(store, keys) == [True] * 8
    store.close()
    other.close()
