"""The table of promises in the docs is the one that the suites hold the backends to; kills of those that are files."""

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hicache.storage import PageStore, backend_names, open_store
from hicache.testing.storage import sample_chain
from tests.storage.promises import PROMISES, table
from tests.storage.support import REPOSITORY, load_pages

WRITER = """
import os, signal, sys
from hicache.storage import PageStore, open_store
from hicache.testing.storage import sample_chain
from tests.storage.support import store_pages
assert all(store_pages(PageStore(open_store(sys.argv[1])), sample_chain(3)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_docs_have_the_table():
    text = (REPOSITORY / "docs/storage-backends.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in text, "put this into docs/storage-backends.md:\n" + "\n".join(table())


def test_every_backend_is_in_the_table():
    other_names = {"redis", "rediss", "valkeys"}
    assert set(backend_names()) - other_names == set(PROMISES)


@pytest.mark.parametrize("name", ["file", "nixl-posix"])
def test_pages_outlive_the_process_that_stored_them(name: str, tmp_path: Path):
    if name == "nixl-posix" and not find_spec("nixl_cu12"):
        pytest.skip("the nixl-posix store is not installed: pip install --no-deps nixl-cu12")
    url = f"{name}:{tmp_path}/store"
    done = subprocess.run([sys.executable, "-c", WRITER, url], cwd=REPOSITORY, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    store = PageStore(open_store(url))
    assert load_pages(store, sample_chain(3)) == [PROMISES[name].outlives_kill] * 3
    store.close()
