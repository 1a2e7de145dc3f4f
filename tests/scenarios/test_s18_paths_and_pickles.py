"""S18: names that look like paths stay names, and what lies in a store is bytes, never code."""

import ast
import pickle
import re
from pathlib import Path

import pytest

import hicache
from hicache.keys import Namespace, page_keys
from hicache.storage import PageStore, chain_keys
from hicache.storage.file import FileBackend
from hicache.testing.storage import sample_chain
from tests.storage.support import files_below, load_pages, spot, store_pages

NAMES = ["../../x", "/etc/x", "a\0b", "n" * 300, "..", ".", "", "con", "x\n", "ключ", "\ud800"]
ALLOWED = re.compile(r"hicache-store\.json|journal|pages/[0-9a-f]{12}\.(slots|index)|writers/[0-9a-f]{16}\.writer")


@pytest.mark.parametrize("name", NAMES)
def test_names_never_become_paths(tmp_path: Path, name: str):
    root = tmp_path / "inner" / "store"
    store = PageStore(FileBackend(root))
    first = Namespace(name, name, name, 4, name, shard=name, adapter=name, salt=name).fingerprint
    keys = chain_keys(first, name, first, page_keys(first, bytes(64), 4))
    assert store_pages(store, keys) == [True] * 4
    assert load_pages(store, keys) == [True] * 4
    for path in files_below(tmp_path):
        assert ALLOWED.fullmatch(path.relative_to(root).as_posix()), path
    store.close()


class Bomb:
    """Does harm when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self._target,))


def test_a_pickle_in_the_place_of_a_page_is_a_damaged_page(tmp_path: Path):
    trap = tmp_path / "executed"
    keys = sample_chain(2)
    store = PageStore(FileBackend(tmp_path / "store"))
    store_pages(store, keys)
    where = spot(tmp_path / "store", keys[0])
    blob = pickle.dumps(Bomb(trap))
    where.overwrite(blob.ljust(where.value_bytes, b"\0"))
    assert load_pages(store, keys) == [False, True]
    assert store.stats().damaged_pages == 1
    (tmp_path / "store" / "journal").write_bytes(blob)
    store.close()
    where.path.with_suffix(".index").write_bytes(blob)
    store = PageStore(FileBackend(tmp_path / "store"))
    assert load_pages(store, keys) == [False, False]
    assert store_pages(store, keys) == load_pages(store, keys) == [True, True]
    assert not trap.exists()
    store.close()


def test_nothing_in_hicache_can_unpickle():
    for source in Path(hicache.__file__).parent.rglob("*.py"):
        tree = ast.parse(source.read_text(encoding="utf-8"))
        imported = {
            name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        }
        assert not imported & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}, source
