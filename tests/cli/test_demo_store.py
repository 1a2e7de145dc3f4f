"""A run's store is new and private; old runs go, and nothing else does."""

import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from hicache.cli.demo_store import KEPT_RUNS, new_store
from hicache.errors import ConfigError


def ended_run(cache_folder: Path) -> Path:
    with new_store(cache_folder) as store:
        return store


def test_store_is_new_empty_and_private(tmp_path: Path) -> None:
    with new_store(tmp_path) as one, new_store(tmp_path) as two:
        assert one != two
        for store in (one, two):
            assert list(store.iterdir()) == []
            assert stat.S_IMODE(store.stat().st_mode) == 0o700


def test_old_runs_are_removed_and_the_last_one_is_not(tmp_path: Path) -> None:
    stores = [ended_run(tmp_path) for _ in range(KEPT_RUNS + 2)]
    assert [store.exists() for store in stores] == [False] * 2 + [True] * KEPT_RUNS


def test_run_that_goes_on_is_never_removed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(new_store(tmp_path))
        for _ in range(KEPT_RUNS + 2):
            ended_run(tmp_path)
        assert first.exists()
    for _ in range(KEPT_RUNS):
        ended_run(tmp_path)
    assert not first.exists()


def test_what_no_demo_has_made_stays(tmp_path: Path) -> None:
    other = tmp_path / "demo" / "run-mine"
    other.mkdir(parents=True)
    (other / "file").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "made-by-hicache-demo").touch()
    (tmp_path / "demo" / "run-link").symlink_to(elsewhere)
    for _ in range(KEPT_RUNS + 2):
        ended_run(tmp_path)
    assert (other / "file").exists()
    assert (elsewhere / "made-by-hicache-demo").exists()


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cache_folder="), new_store(tmp_path / "file"):
        pass
