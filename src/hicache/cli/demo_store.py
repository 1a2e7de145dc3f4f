"""Each run of the demo has a new store, so that it starts cold; only stores that a demo has made are ever removed."""

import shutil
import tempfile
from pathlib import Path

MARK = "made-by-hicache-demo"
KEPT_RUNS = 2
"""This run and the one before, which somebody may be serving from."""


def new_store(cache_folder: Path) -> Path:
    """An empty folder of the user's own; stores of runs before the last one are removed."""
    runs = cache_folder / "demo"
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_old(runs)
    run = Path(tempfile.mkdtemp(prefix="run-", dir=runs))
    (run / MARK).touch()
    store = run / "store"
    store.mkdir(mode=0o700)
    return store


def _remove_old(runs: Path) -> None:
    marks = sorted(runs.glob(f"run-*/{MARK}"), key=lambda mark: mark.stat().st_mtime_ns)
    for mark in marks[: -(KEPT_RUNS - 1)]:
        if not mark.parent.is_symlink():
            shutil.rmtree(mark.parent, ignore_errors=True)
