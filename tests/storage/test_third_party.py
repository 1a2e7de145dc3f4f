"""A package that knows only hicache's public names adds a backend, and proves it with hicache's own suite."""

import os
import subprocess
import sys
from pathlib import Path

SHELF = '''
import threading

import numpy as np

from hicache.errors import ClosedError, ConfigError
from hicache.storage import ReadResult, StorageKey, StoreLocation
from hicache.storage.protocol import Cleared


class Shelf:
    """Keeps values in a dict that belongs to a name, for as long as the process lives."""

    shelves = {}

    def __init__(self, name):
        self.values = self.shelves.setdefault(name, {})
        self.lock = threading.Lock()
        self.closed = False

    def contains(self, keys):
        self.require_open()
        return np.array([name(key) in self.values for key in keys], dtype=bool)

    def read(self, keys, values):
        self.require_open()
        result = ReadResult.nothing(len(keys))
        for i, (key, parts) in enumerate(zip(keys, values)):
            with self.lock:
                value = self.values.get(name(key))
                result.ok[i] = value is not None and len(value) == sum(part.nbytes for part in parts)
                result.damaged[i] = value is not None and not result.ok[i]
                if result.damaged[i]:
                    del self.values[name(key)]
            start = 0
            for part in parts if result.ok[i] else ():
                part.cast("B")[:] = value[start : start + part.nbytes]
                start += part.nbytes
        return result

    def write(self, keys, values):
        self.require_open()
        for key, parts in zip(keys, values):
            with self.lock:
                self.values[name(key)] = b"".join(parts)
        return np.ones(len(keys), dtype=bool)

    def delete(self, keys):
        self.require_open()
        with self.lock:
            return np.array([self.values.pop(name(key), None) is not None for key in keys], dtype=bool)

    def clear(self, namespace):
        self.require_open()
        with self.lock:
            gone = [self.values.pop(each) for each in list(self.values) if each[0] == namespace]
        return Cleared(len(gone), sum(map(len, gone)))

    def health(self):
        return ()

    def close(self):
        self.closed = True

    def require_open(self):
        if self.closed:
            raise ClosedError("this shelf is closed")


def name(key: StorageKey):
    return key.namespace, key.pool, key.page


def open_shelf(location: StoreLocation) -> Shelf:
    location.known_options()
    if not location.path:
        raise ConfigError("a shelf has a name: shelf:NAME")
    return Shelf(location.path)
'''

TESTS = """
import pytest

from hicache.errors import ConfigError
from hicache.storage import backend_names, open_store
from hicache.testing.storage import StorageBackendConformance


class TestShelf(StorageBackendConformance):
    shared = True

    def make_backend(self, folder):
        return open_store(f"shelf:{folder}")


def test_names():
    assert "shelf" in backend_names()
    with pytest.raises(ConfigError, match="a shelf has a name"):
        open_store("shelf:")
    with pytest.raises(ConfigError, match="no option 'cap'"):
        open_store("shelf:x", cap=1)
"""


def install(folder: Path) -> None:
    """What an installer leaves in a folder of packages."""
    info = folder / "shelf_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hicache.storage]\nshelf = shelf_store:open_shelf\n")
    (folder / "shelf_store.py").write_text(SHELF)
    (folder / "test_shelf.py").write_text(TESTS)


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shelf.py"]
    path = os.pathsep.join([str(folder), *(each for each in [os.environ.get("PYTHONPATH")] if each)])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_package_of_somebody_else_brings_a_backend(tmp_path: Path):
    install(tmp_path)
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_the_suite_finds_what_is_wrong_with_it(tmp_path: Path):
    install(tmp_path)
    shelf = tmp_path / "shelf_store.py"
    shelf.write_text(
        shelf.read_text().replace("return key.namespace, key.pool, key.page", 'return key.namespace, "", key.page')
    )
    done = run(tmp_path)
    assert done.returncode == 1
    assert "test_names_of_pools_are_only_names" in done.stdout and "test_every_part_of_a_key_counts" in done.stdout
