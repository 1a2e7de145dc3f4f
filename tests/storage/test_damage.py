"""Whatever byte of a store's files is wrong or missing: never a wrong byte, and each page works again once written."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache.errors import ConfigError
from hicache.keys import Namespace, page_keys
from hicache.storage import PageStore, StorageKey, chain_keys
from hicache.storage.file import FileBackend
from hicache.storage.file.folder import MARKER
from hicache.testing.storage import sample_chain, sample_value
from tests.storage.support import files_below, load_pages, spot, store_pages

PAGE_BYTES = 64
KEYS = sample_chain(3)
CAP_BYTES = 3 * 4096

STRIDES = [17, pytest.param(1, marks=pytest.mark.full)]
"""Every so many bytes of what is in use of each file, and each byte."""


class Damaged:
    """A small store's files, and any number of times the same store with something wrong in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        store = self.open()
        assert store_pages(store, KEYS, PAGE_BYTES) == [True] * 3
        store.close()
        self.files = {path: path.read_bytes() for path in files_below(root)}

    def open(self) -> PageStore:
        return PageStore(FileBackend(self.root, CAP_BYTES))

    def restore(self) -> None:
        for path, content in self.files.items():
            path.write_bytes(content)

    def places(self, stride: int) -> Iterator[tuple[Path, int]]:
        """Files and positions in them."""
        for path, content in self.files.items():
            for position in range(0, len(content), stride):
                if stride == 1 or path.suffix != ".slots" or position % 4096 < PAGE_BYTES + 256:
                    yield path, position


def check(store: PageStore) -> int:
    """How many pages were still there; afterwards all are."""
    there = load_pages(store, KEYS, PAGE_BYTES)
    assert store_pages(store, KEYS, PAGE_BYTES) == [True] * 3
    assert load_pages(store, KEYS, PAGE_BYTES) == [True] * 3
    return sum(there)


def check_reopened(damaged: Damaged, path: Path) -> int:
    """A store whose marker is wrong is refused; nothing else is."""
    if path.name != MARKER:
        store = damaged.open()
        found = check(store)
        store.close()
        return found
    before = {path: path.read_bytes() for path in files_below(damaged.root)}
    try:
        damaged.open().close()
    except ConfigError:
        assert {path: path.read_bytes() for path in files_below(damaged.root)} == before
    return 0


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_a_flipped_bit_anywhere(tmp_path: Path, stride: int, mask: int):
    damaged = Damaged(tmp_path)
    found = []
    for path, position in damaged.places(stride):
        damaged.restore()
        content = bytearray(damaged.files[path])
        content[position] ^= mask
        path.write_bytes(content)
        found.append((path.name, check_reopened(damaged, path)))
    assert {pages for name, pages in found if name != MARKER} == {2, 3}, "one bit costs one page at most"


@pytest.mark.parametrize("stride", STRIDES)
def test_a_flipped_bit_under_an_open_store(tmp_path: Path, stride: int):
    damaged = Damaged(tmp_path)
    for path, position in damaged.places(stride):
        damaged.restore()
        store = damaged.open()
        with path.open("r+b") as file:
            file.seek(position)
            file.write(bytes([damaged.files[path][position] ^ 0x04]))
        check(store)
        store.close()


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_cut_at_any_length(tmp_path: Path, stride: int, is_open: bool):
    damaged = Damaged(tmp_path)
    for path, length in damaged.places(stride):
        damaged.restore()
        store = damaged.open() if is_open else None
        with path.open("r+b") as file:
            file.truncate(length)
        if store is None:
            check_reopened(damaged, path)
            continue
        check(store)
        store.close()


@pytest.mark.parametrize("name", ["slots", "index"])
@pytest.mark.parametrize("how", ["gone", "empty", "zeros", "ones", "twice"])
def test_a_whole_file_is_wrong(tmp_path: Path, name: str, how: str):
    damaged = Damaged(tmp_path)
    [path] = [path for path in damaged.files if path.suffix == f".{name}"]
    content = damaged.files[path]
    wrong = {"empty": b"", "zeros": bytes(len(content)), "ones": b"\xff" * len(content), "twice": content * 2}
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(wrong[how])
    assert check_reopened(damaged, path) == (3 if how == "twice" and name == "slots" else 0) or how == "twice"


OURS = Namespace("model", "weights", "float32", 16, "heads 2", shard="rank 0 of 2")
OTHERS = {
    "model": dataclasses.replace(OURS, model="another"),
    "weights": dataclasses.replace(OURS, weights="finetuned"),
    "dtype": dataclasses.replace(OURS, dtype="bfloat16"),
    "page size": dataclasses.replace(OURS, page_size=8),
    "layout": dataclasses.replace(OURS, geometry="heads 1"),
    "rank": dataclasses.replace(OURS, shard="rank 1 of 2"),
    "tenant": dataclasses.replace(OURS, salt="theirs"),
    "version": OURS,
}


def keys_in(namespace: Namespace) -> list[StorageKey]:
    first = namespace.fingerprint
    return chain_keys(first, "kv", first, page_keys(first, np.arange(48, dtype="<u4").tobytes(), 16))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("what", sorted(OTHERS))
def test_pages_of_something_else_in_the_place_of_ours(tmp_path: Path, monkeypatch, what: str, whole: bool):
    """With or without the records that belong to them."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    mine, others = keys_in(OURS), keys_in(OTHERS[what])
    with monkeypatch.context() as patch:
        if what == "version":
            patch.setattr("hicache.storage.codec.FORMAT_VERSION", 99)
        store = PageStore(FileBackend(theirs))
        assert store.write(others, [memoryview(b"o" * PAGE_BYTES)] * 3).all()
        store.close()
    store = PageStore(FileBackend(ours))
    assert store_pages(store, mine, PAGE_BYTES) == [True] * 3
    store.close()
    source, target = spot(theirs, others[0]).path, spot(ours, mine[0]).path
    target.write_bytes(source.read_bytes())
    if whole:
        target.with_suffix(".index").write_bytes(source.with_suffix(".index").read_bytes())
    store = PageStore(FileBackend(ours))
    assert load_pages(store, mine, PAGE_BYTES) == [False] * 3
    assert store_pages(store, mine, PAGE_BYTES) == load_pages(store, mine, PAGE_BYTES) == [True] * 3
    store.close()


def test_a_page_of_another_size_is_not_taken_for_this_one(tmp_path: Path):
    store = PageStore(FileBackend(tmp_path))
    buffer = memoryview(bytearray(2 * PAGE_BYTES))
    assert store_pages(store, KEYS, PAGE_BYTES) == [True] * 3
    assert not store.read(KEYS[:1], [buffer]).ok[0]
    assert not store.contains(KEYS[:1])[0]
    assert store.write(KEYS[:1], [memoryview(sample_value(KEYS[0], 2 * PAGE_BYTES))])[0]
    assert store.read(KEYS[:1], [buffer]).ok[0]
    assert bytes(buffer) == sample_value(KEYS[0], 2 * PAGE_BYTES)
    store.close()
