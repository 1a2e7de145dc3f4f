"""The bench of stores measures what it says, checks what comes back, and leaves nothing behind."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache.bench.storage import Options, run, table
from hicache.bench.storage.run import PHASES, RAW
from hicache.errors import ConfigError, StorageError
from hicache.storage import PageStore, register_backend
from hicache.storage.file import FileBackend
from hicache.storage.memory import MemoryBackend
from hicache.storage.protocol import Buffers, ReadResult, StorageKey
from hicache.storage.registry import unregister_backend
from hicache.testing.storage import sample_chain
from tests.storage.support import load_pages, store_pages, value_bytes


@pytest.mark.parametrize("threads", [1, 3])
def test_every_store_and_page_size_is_measured_next_to_a_plain_file(tmp_path: Path, threads: int):
    file_url = f"file:{tmp_path}/mine"
    urls = (file_url, "memory:")
    options = Options(urls, (4096, 10_000), 100_000, rounds=3, batch_pages=4, threads=threads, folder=tmp_path)
    report = run(options)
    rows = {(row["store"], row["page_bytes"]): row for row in report["rows"]}
    assert list(rows) == [(name, size) for size in (4096, 10_000) for name in (file_url, "memory:", RAW)]
    for (name, _), row in rows.items():
        for phase in PHASES:
            known = phase != "get_cold" or name != "memory:"
            for key in ("gb_s", "cpu_s_per_gb", "of_plain"):
                assert (row[f"{phase}_{key}"] is not None) == known
        assert row["put_gb_s"] > 0
        assert row["exists_us"] >= 0
        assert (row["put_of_plain"] == 1.0) or name != RAW
    lines = table(report).splitlines()
    assert len(lines) == 7
    assert lines[2].split()[4] == "-", "memory has no cold reads"


def test_nothing_is_left_behind_and_what_was_there_stays(tmp_path: Path):
    keys = sample_chain(3)
    store = PageStore(FileBackend(tmp_path / "mine"))
    store_pages(store, keys)
    before = value_bytes(tmp_path / "mine")
    run(Options((f"file:{tmp_path}/mine",), (5000,), 20_000, rounds=1, folder=tmp_path))
    run(Options((), (5000,), 20_000, rounds=1, folder=tmp_path))
    assert load_pages(store, keys) == [True] * 3
    store.close()
    assert value_bytes(tmp_path / "mine") == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


class Forgetful(MemoryBackend):
    """Says that it read, and did not."""

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        result = ReadResult.nothing(len(keys))
        result.failed[:] = True
        return result


def test_a_store_that_loses_or_refuses_pages_is_not_measured(tmp_path: Path):
    register_backend("forgetful", lambda location: Forgetful())
    try:
        with pytest.raises(StorageError, match="did not give back"):
            run(Options(("forgetful:",), (4096,), 10_000, rounds=1, folder=tmp_path))
    finally:
        unregister_backend("forgetful")
    with pytest.raises(StorageError, match="give it a larger cap"):
        run(Options(("memory:?cap=5000",), (4096,), 10_000, rounds=1, folder=tmp_path))
    assert not list(tmp_path.iterdir())


def test_passwords_are_not_printed(tmp_path: Path):
    register_backend("secret", lambda location: MemoryBackend())
    try:
        report = run(Options(("secret://me:pass@host/1",), (4096,), 10_000, rounds=1, folder=tmp_path))
    finally:
        unregister_backend("secret")
    assert report["rows"][0]["store"] == "secret://...@host/1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(rounds=0), "rounds is 0"),
        (Options(threads=0), "threads is 0"),
        (Options(batch_pages=-1), "batch is -1"),
        (Options(page_bytes=(1 << 30,)), "do not fit into"),
        (Options(page_bytes=(0,)), "do not fit into"),
        (Options(folder=Path("/nowhere")), "/nowhere is not a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: Options, message: str):
    with pytest.raises(ConfigError, match=message):
        run(options)
