"""The file store's folder: its modes, its marker, and what in it belongs to others."""

import json
import os
import stat
from pathlib import Path

import pytest

from hicache.errors import ConfigError, StorageError
from hicache.storage import PageStore
from hicache.storage.file import FileBackend
from hicache.testing.storage import sample_chain
from tests.storage.support import (
    SLOT_BYTES,
    files_below,
    spot,
    store_pages,
)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_everything_is_private_whatever_the_umask(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        backend = FileBackend(tmp_path / "a" / "store")
        store_pages(PageStore(backend), sample_chain(3))
    finally:
        os.umask(before)
    for path in (tmp_path / "a").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    backend.close()


def test_a_folder_that_was_empty_becomes_private(tmp_path: Path):
    tmp_path.chmod(0o755)
    FileBackend(tmp_path).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def snapshot(root: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mode, path.read_bytes()) for path in files_below(root)}


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"is not empty and is not a page store .*thesis\.txt"):
        FileBackend(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_store_of_another_version_is_refused_and_left_alone(tmp_path: Path):
    FileBackend(tmp_path / "s").close()
    marker = tmp_path / "s" / "hicache-store.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"version": 99}))
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="version 99, this hicache uses version 3"):
        FileBackend(tmp_path / "s")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', '{"kind": "something", "version": 1}'])
def test_a_damaged_marker_is_refused(tmp_path: Path, content: str):
    (tmp_path / "hicache-store.json").write_text(content)
    with pytest.raises(ConfigError, match="damaged or not ours"):
        FileBackend(tmp_path)


def test_a_store_left_half_made_can_be_opened(tmp_path: Path):
    (tmp_path / f".hicache-store-{'0' * 16}").write_text("")
    FileBackend(tmp_path).close()
    assert not list(tmp_path.glob(".hicache-store-*"))


def test_a_place_that_cannot_be_a_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot use .*file/store"):
        FileBackend(tmp_path / "file" / "store")
    with pytest.raises(ConfigError, match="NUL"):
        FileBackend(f"{tmp_path}/a\0b")
    with pytest.raises(ConfigError, match="cap is 0 bytes"):
        FileBackend(tmp_path / "s", 0)


def test_files_of_others_inside_the_store_are_never_touched(tmp_path: Path):
    keys = sample_chain(8)
    store = PageStore(FileBackend(tmp_path, 4 * SLOT_BYTES))
    store_pages(store, keys[:4])
    name = spot(tmp_path, keys[0]).path.name
    foreign = [
        tmp_path / "notes.txt",
        tmp_path / "pages" / "README",
        tmp_path / "pages" / f"{name}.bak",
        tmp_path / "pages" / name[1:],
        tmp_path / "pages" / f"{4097:012x}.slots",
        tmp_path / "pages" / f"{0:012x}.slots",
        tmp_path / "writers" / "mine",
        tmp_path / "writers" / f"{'a' * 16}-{'b' * 16}",
    ]
    for path in foreign:
        path.write_text("mine")
    (tmp_path / "pages" / f"{8192:012x}.slots").mkdir()
    store.close()
    backend = FileBackend(tmp_path, 2 * SLOT_BYTES)
    assert backend.used_bytes == 2 * SLOT_BYTES, "what is not the store's does not count"
    store = PageStore(backend)
    store.delete(keys)
    store_pages(store, sample_chain(8, chain="b"))
    store.close()
    assert [path.read_text() for path in foreign] == ["mine"] * len(foreign)


@pytest.mark.parametrize("name", ["slots", "index"])
def test_a_link_in_a_files_place_is_not_followed(tmp_path: Path, name: str):
    store = PageStore(FileBackend(tmp_path / "s"))
    store_pages(store, sample_chain(1))
    store.close()
    path = tmp_path / "s" / "pages" / f"{SLOT_BYTES:012x}.{name}"
    path.rename(tmp_path / "elsewhere")
    content = (tmp_path / "elsewhere").read_bytes()
    path.symlink_to(tmp_path / "elsewhere")
    if name == "index":
        with pytest.raises(StorageError, match="cannot open the page store"):
            FileBackend(tmp_path / "s")
    else:
        store = PageStore(FileBackend(tmp_path / "s"))
        assert store_pages(store, sample_chain(2)) == [False, False]
        assert "ELOOP" in store.health()[0]
        store.close()
    assert (tmp_path / "elsewhere").read_bytes() == content
