"""A store is summed up, checked and tidied by what it holds, whoever wrote it."""

import time
from hashlib import sha256
from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache.storage import PageStore, StorageBackend
from hicache.storage.chains import entry_id
from hicache.storage.codec import HEADER_BYTES
from hicache.storage.description import Description, PoolNote
from hicache.storage.file import FileBackend
from hicache.storage.inventory import find_namespace, summarise, tidy, verify
from hicache.storage.listing import ListsValues, require_listing
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import MeteredBackend
from hicache.testing.storage import SAMPLE_NAMESPACE, sample_chain
from tests.storage.support import PAGE_BYTES, load_pages, spot, store_pages
from tests.world import namespace

OTHER = sha256(b"another namespace").digest()
VALUE_BYTES = PAGE_BYTES + HEADER_BYTES
LATER_NS = 3600 * 1_000_000_000


def text(*pools: tuple[str, bool]) -> str:
    return Description.of(namespace(), [PoolNote(name, PAGE_BYTES, whole) for name, whole in pools]).text()


def silent(done: int) -> None:
    pass


@pytest.fixture(params=["file", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path):
    opened = FileBackend(tmp_path / "store") if request.param == "file" else MemoryBackend()
    yield opened
    opened.close()


def test_what_is_said_of_a_namespace_comes_back(backend: FileBackend | MemoryBackend):
    store = PageStore(backend)
    store.describe(SAMPLE_NAMESPACE, text(("kv", True)))
    store_pages(store, [*sample_chain(3), *sample_chain(1, pool="state"), *sample_chain(2, namespace=OTHER)])
    summary = summarise(backend)
    assert (summary.pages, summary.size_bytes) == (6, 6 * VALUE_BYTES)
    assert summary.taken_bytes >= summary.size_bytes and summary.problems == ()
    found = {one.fingerprint: one for one in summary.namespaces}
    assert set(found) == {SAMPLE_NAMESPACE, OTHER}
    ours = found[SAMPLE_NAMESPACE]
    assert (ours.pages, ours.size_bytes) == (4, 4 * VALUE_BYTES)
    assert ours.description is not None and ours.description.model == "test"
    assert abs(ours.used_s - time.time()) < 3600
    assert found[OTHER].description is None
    assert find_namespace(summary, OTHER.hex()[:6]) is found[OTHER]
    for prefix in ("", "zz"):
        with pytest.raises(ConfigError, match="0 namespaces"):
            find_namespace(summary, prefix)


def test_a_salt_is_not_written_down():
    what = Description.of(namespace(salt="a secret"), [])
    assert what.salted and "secret" not in what.text()
    assert Description.parse(what.text()) == what
    assert Description.parse("{}") is None and Description.parse("no") is None


def test_damage_is_found_and_removed_only_on_demand(tmp_path: Path):
    with_damage = FileBackend(tmp_path / "store")
    store, keys = PageStore(with_damage), sample_chain(6)
    store_pages(store, keys)
    spot(with_damage.root, keys[1]).flip(10)
    spot(with_damage.root, keys[3]).flip(HEADER_BYTES + 99)
    seen: list[int] = []
    found = verify(with_damage, with_damage.values(), repair=False, progress=seen.append)
    assert (found.good_pages, found.damaged_pages, found.removed.pages, sum(seen)) == (4, 2, 0, 6)
    assert all(with_damage.contains(keys))
    listed = with_damage.values()
    found = verify(with_damage, listed, repair=True, progress=silent)
    assert (found.good_pages, found.removed.pages) == (4, 2)
    assert with_damage.contains(keys).tolist() == [True, False, True, False, True, True]
    found = verify(with_damage, listed, repair=True, progress=silent)
    assert (found.good_pages, found.damaged_pages, found.gone_pages) == (4, 0, 2)
    store_pages(store, keys)
    assert all(load_pages(store, keys))
    store.close()


def test_a_good_value_under_another_name_is_damaged():
    backend = MemoryBackend()
    keys = sample_chain(2)
    store_pages(PageStore(backend), keys)
    first, second = (entry_id(key) for key in keys)
    backend._values[first] = backend._values[second]
    found = verify(backend, backend.values(), repair=False, progress=silent)
    assert found.damaged == {"a page of another namespace, pool, key or size": 1}


def test_pages_that_nothing_leads_to_go_once_they_have_rested(backend: FileBackend | MemoryBackend):
    store = PageStore(backend)
    kv, swa, other = sample_chain(6), sample_chain(6, pool="swa"), sample_chain(4, chain="b")
    store.describe(SAMPLE_NAMESPACE, text(("kv", True), ("swa", False)))
    store_pages(store, [*kv, *swa[2:], *other, *sample_chain(3, namespace=OTHER)])
    store.delete([kv[2], *sample_chain(1, namespace=OTHER)])
    assert tidy(backend, None, time.time_ns()).unreachable.pages == 0
    done = tidy(backend, None, time.time_ns() + LATER_NS)
    assert done.unreachable.pages == 3 + 4
    assert backend.contains(kv).tolist() == [True, True] + [False] * 4
    assert not backend.contains(swa).any() and backend.contains(other).all()
    assert backend.contains(sample_chain(3, namespace=OTHER)).tolist() == [False, True, True], "nobody says how it is"


def test_gaps_are_normal_where_no_pool_needs_all_pages(backend: FileBackend | MemoryBackend):
    store, keys = PageStore(backend), sample_chain(6, pool="state")
    store.describe(SAMPLE_NAMESPACE, text(("state", False)))
    store_pages(store, keys[2:])
    assert tidy(backend, None, time.time_ns() + LATER_NS).unreachable.pages == 0


def test_a_size_is_kept_to_by_dropping_the_oldest_tails(backend: FileBackend | MemoryBackend):
    store, old, new = PageStore(backend), sample_chain(4), sample_chain(4, chain="b")
    store_pages(store, old)
    store_pages(store, new)
    done = tidy(backend, backend.taken_bytes() * 6 // 8, time.time_ns())
    assert done.trimmed.pages == 2
    assert backend.contains(old).tolist() == [True, True, False, False] and backend.contains(new).all()


def test_a_store_that_cannot_list_says_so():
    backend: StorageBackend = MeteredBackend(MemoryBackend())
    assert not isinstance(backend, ListsValues)
    with pytest.raises(ConfigError, match=r"^thing: stores can't list"):
        require_listing("thing", backend)
