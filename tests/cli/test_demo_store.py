"""A run's store is new and private; old runs go, and nothing else does."""

import stat
from pathlib import Path

from hicache.cli.demo_store import KEPT_RUNS, new_store


def test_store_is_new_empty_and_private(tmp_path: Path) -> None:
    one, two = new_store(tmp_path), new_store(tmp_path)
    assert one != two
    for store in (one, two):
        assert list(store.iterdir()) == []
        assert stat.S_IMODE(store.stat().st_mode) == 0o700


def test_old_runs_are_removed_and_the_last_one_is_not(tmp_path: Path) -> None:
    stores = [new_store(tmp_path) for _ in range(KEPT_RUNS + 2)]
    assert [store.exists() for store in stores] == [False] * 2 + [True] * KEPT_RUNS


def test_what_no_demo_has_made_stays(tmp_path: Path) -> None:
    other = tmp_path / "demo" / "run-mine"
    other.mkdir(parents=True)
    (other / "file").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "made-by-hicache-demo").touch()
    (tmp_path / "demo" / "run-link").symlink_to(elsewhere)
    for _ in range(KEPT_RUNS + 2):
        new_store(tmp_path)
    assert (other / "file").exists()
    assert (elsewhere / "made-by-hicache-demo").exists()
