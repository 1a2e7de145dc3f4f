"""S28: stored in one process, found by another one under another PYTHONHASHSEED; old files count against the cap."""

import os
import subprocess
import sys
from pathlib import Path

from hicache.keys import Namespace, page_keys
from hicache.storage import chain_keys
from hicache.storage.file import FileBackend
from tests.storage.support import REPOSITORY, SLOT_BYTES

SCRIPT = """
import sys
from hicache.keys import Namespace, page_keys
from hicache.storage import PageStore, chain_keys, open_store
from tests.storage.support import load_pages, store_pages
first = Namespace("model", "weights", "float32", 16, "geometry", salt="tenant").fingerprint
keys = chain_keys(first, "kv", first, page_keys(first, bytes(range(256)) * 5, 16))
store = PageStore(open_store(f"file:{sys.argv[1]}"))
print(sum((store_pages if sys.argv[2] == "write" else load_pages)(store, keys)))
store.close()
"""


def run(folder: Path, what: str, seed: str) -> int:
    command = [sys.executable, "-c", SCRIPT, str(folder), what]
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60, cwd=REPOSITORY)
    return int(done.stdout)


def test_another_process_finds_every_full_page(tmp_path: Path):
    assert run(tmp_path / "s", "write", "1") == 20
    assert run(tmp_path / "s", "read", "2") == 20


def test_what_an_earlier_process_left_counts(tmp_path: Path):
    assert run(tmp_path, "write", "1") == 20
    backend = FileBackend(tmp_path)
    assert backend.used_bytes == 20 * SLOT_BYTES
    backend.close()
    backend = FileBackend(tmp_path, 7 * SLOT_BYTES)
    first = Namespace("model", "weights", "float32", 16, "geometry", salt="tenant").fingerprint
    keys = chain_keys(first, "kv", first, page_keys(first, bytes(range(256)) * 5, 16))
    assert backend.contains(keys).tolist() == [True] * 7 + [False] * 13, "heads stay"
    assert backend.used_bytes == 7 * SLOT_BYTES
    backend.close()
