"""Backends by name: what a URL means, and what is said about one that is wrong."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from hicache.errors import ConfigError, StorageError
from hicache.storage import BackendSpec, StoreLocation, backend_names, open_store, register_backend, registry
from hicache.storage.file import FileBackend
from hicache.storage.memory import MemoryBackend

BUILT_IN = ("file", "memory", "mooncake", "nixl-posix", "redis", "rediss", "s3", "valkey", "valkeys")


@pytest.mark.parametrize("form", ["file:{}", "file://{}", "file:{}?cap=1MiB", "file:{}?sync=0.5"])
def test_a_file_url(tmp_path: Path, form: str):
    backend = open_store(form.format(tmp_path / "s"))
    assert isinstance(backend, FileBackend)
    assert backend.root == tmp_path / "s"
    backend.close()


def test_relative_home_and_encoded_paths(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for url, expected in {"file:./s": "s", "file:t": "t", "file:~/s": "home/s", "file:./a%23b%20c": "a#b c"}.items():
        backend = open_store(url)
        assert isinstance(backend, FileBackend)
        assert backend.root == tmp_path / expected
        backend.close()


def test_options_count(tmp_path: Path):
    for backend in (open_store("memory:?cap=1KiB"), open_store("memory:", cap=1024), open_store("memory:", cap="1KiB")):
        assert isinstance(backend, MemoryBackend)
        assert backend._cap_bytes == 1024
    assert isinstance(open_store("memory:", cap=None), MemoryBackend)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("./store", "names no kind of store; write for instance file:./store"),
        ("nonsense:x", "no storage backend named 'nonsense'; there are: file, memory, "),
        ("file:", "names no folder"),
        ("file:x\0y", "NUL"),
        ("file:x%00y", "NUL"),
        ("file:x#y", "write it as %23"),
        ("file:x?cap=50%25", "cap='50%'"),
        ("file:x?cap=1MiB&cap=2MiB", "gives an option twice"),
        ("file:x?size=1MiB", "no option 'size'; there are: cap, sync"),
        ("file:x?sync=soon", "sync='soon': write seconds"),
        ("file:x?cap", "not understood"),
        ("memory:x", "has no path"),
        ("memory:?cap=0", "cap is 0 bytes"),
    ],
)
def test_a_wrong_url_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch, url: str, message: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        open_store(url)
    assert message in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_a_store_that_cannot_be_used(tmp_path: Path):
    (tmp_path / "f").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        open_store(f"file:{tmp_path}/f/s")


def open_mine(location: StoreLocation) -> MemoryBackend:
    return MemoryBackend(int(location.known_options("cap").get("cap", "7")))


def test_a_backend_can_be_registered():
    register_backend("mine", open_mine)
    try:
        backend = open_store("mine:anything", cap=9)
        assert isinstance(backend, MemoryBackend)
        assert backend._cap_bytes == 9
        assert "mine" in backend_names()
        with pytest.raises(ConfigError, match="'mine' is registered already"):
            register_backend("mine", open_mine)
    finally:
        registry.unregister_backend("mine")
    with pytest.raises(ConfigError, match="no storage backend named 'mine'"):
        open_store("mine:anything")
    with pytest.raises(ConfigError, match="'file' is registered already"):
        register_backend("file", open_mine)


def test_a_backend_that_is_not_installed_says_how():
    register_backend("far", BackendSpec("package_that_is_not_there.storage:open", "pip install 'hicache[far]'"))
    try:
        with pytest.raises(ConfigError, match=r"needs package_that_is_not_there, .* pip install 'hicache\[far\]'"):
            open_store("far:x")
    finally:
        registry.unregister_backend("far")


def test_an_installed_package_offers_a_backend(monkeypatch):
    points = (
        EntryPoint("plugged", f"{__name__}:open_mine", registry.ENTRY_POINT_GROUP),
        EntryPoint("broken", "package_that_is_not_there:open", registry.ENTRY_POINT_GROUP),
        EntryPoint("wrong", "os:sep", registry.ENTRY_POINT_GROUP),
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "hicache.storage" else ())
    points[0].load()
    assert isinstance(open_store("plugged:"), MemoryBackend)
    assert backend_names() == tuple(sorted({*BUILT_IN, "broken", "plugged", "wrong"}))
    with pytest.raises(ConfigError, match="reinstall package_that_is_not_there"):
        open_store("broken:")
    with pytest.raises(ConfigError, match="can't be called"):
        open_store("wrong:")
