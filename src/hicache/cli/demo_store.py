"""Each run of the demo has a new store and so starts cold; only stores that demos made and left are ever removed."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hicache.errors import ConfigError

MARK = "made-by-hicache-demo"
KEPT_RUNS = 2
"""This run and the one before, which somebody may be serving from."""


@contextmanager
def new_store(cache_folder: Path) -> Iterator[Path]:
    """An empty folder of the user's own, which stays. Stores of runs before the last one go, unless they still run.

    Raises ConfigError when the cache folder can't be written.
    """
    runs = cache_folder / "demo"
    try:
        runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_old(runs)
        run = Path(tempfile.mkdtemp(prefix="run-", dir=runs))
    except OSError as error:
        raise ConfigError(f"cache_folder={cache_folder}: it can't be written: {error.strerror}") from error
    with (run / MARK).open("wb") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        store = run / "store"
        store.mkdir(mode=0o700)
        yield store


def _remove_old(runs: Path) -> None:
    marks = sorted(runs.glob(f"run-*/{MARK}"), key=lambda mark: mark.stat().st_mtime_ns)
    for mark in marks[: -(KEPT_RUNS - 1)]:
        with mark.open("rb") as held:
            if _has_ended(held):
                shutil.rmtree(mark.parent, ignore_errors=True)  # which follows no links


def _has_ended(mark: BinaryIO) -> bool:
    """Whether no running demo holds the mark."""
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
