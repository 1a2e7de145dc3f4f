"""`hicache store` on a cold store, on one that is being written, and where there is none."""

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from hicache.cli.main import main
from hicache.storage.description import Description
from hicache.storage.file import FileBackend
from tests.world import THREE_POOLS, World, tokens

PROMPT = tokens(*range(41))


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    assert main(["store", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store in which a cache has left ten pages and more."""
    world = World(THREE_POOLS, backend=FileBackend(tmp_path / "store"))
    world.cache.release(world.prefill(PROMPT))
    world.settle()
    world.cache.close()
    return f"file:{tmp_path}/store"


def test_a_cold_store(url: str, capsys: pytest.CaptureFixture[str]):
    [row] = run(capsys, "ls", url)["namespaces"]
    assert (row["model"], row["page_size"], row["salted"], row["pools"]) == ("test", 4, False, ["kv", "swa", "state"])
    total = run(capsys, "stat", url)
    assert total["pages"] == row["pages"] > 10 and total["bytes"] == row["bytes"] <= total["taken_bytes"]
    assert total["namespaces"] == 1 and total["private_pages"] == 0
    checked = run(capsys, "verify", url)
    assert (checked["good_pages"], checked["damaged_pages"]) == (row["pages"], 0)
    assert run(capsys, "gc", url)["dropped_pages"] == 0
    assert run(capsys, "gc", url, "--size", "16KiB")["taken_bytes"] <= 16384
    assert 0 < run(capsys, "stat", url)["pages"] <= 4
    removed = run(capsys, "rm", url, row["namespace"][:8], "--yes")
    assert removed["left_pages"] == 0 < removed["removed_pages"]
    assert run(capsys, "ls", url)["namespaces"] == []


def test_only_pools_that_need_every_page_are_called_whole(url: str):
    store = FileBackend(url.removeprefix("file:"))
    [text] = store.descriptions().values()
    what = Description.parse(text)
    assert what is not None and [pool.whole for pool in what.pools] == [True, False, False]
    store.close()


def test_for_people(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for part in ("ls", "stat", "verify", "gc"):
        assert main(["store", part, url]) == 0
    shown = capsys.readouterr().out
    assert "test (uint8, page 4)" in shown and "damaged pages: 0" in shown
    name = shown.splitlines()[1].split()[0]
    for answer, status in (("n\n", 1), ("", 1), ("y\n", 0)):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert main(["store", "rm", url, name]) == status
    assert "nothing was removed" in capsys.readouterr().err
    assert run(capsys, "stat", url)["pages"] == 0


def test_damage_is_a_status(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    [path, *_] = (tmp_path / "store" / "pages").glob("*.slots")
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    found = run(capsys, "verify", url, status=1)
    assert (found["damaged_pages"], found["removed_pages"]) == (1, 0)
    assert run(capsys, "verify", url, "--repair")["removed_pages"] == 1
    assert run(capsys, "verify", url)["damaged_pages"] == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["ls", "file:/nowhere/at/all"], "there is no store in /nowhere/at/all"),
        (["ls", "no-such-kind:x"], "no storage backend named 'no-such-kind'"),
        (["stat", "valkey://127.0.0.1:9/0?timeout=0.1"], "valkey: stores can't list what they hold"),
        (["rm", "memory:", "ab", "--yes"], "0 namespaces begin with 'ab'"),
        (["gc", "memory:", "--size", "10GB"], "--size=10GB"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]):
    assert main(["store", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert reason in line


def test_looking_makes_no_store(tmp_path: Path):
    assert main(["store", "stat", f"file:{tmp_path}/new"]) == 2
    assert not (tmp_path / "new").exists()


def test_all_of_it_while_others_write(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stop = threading.Event()
    failures: list[str] = []

    def serve() -> None:
        world = World(THREE_POOLS, backend=FileBackend(tmp_path / "store", cap_bytes=1 << 20))
        first = 0
        while not stop.is_set():
            first += 50
            world.cache.release(world.prefill(tokens(*range(first, first + 41))))
            world.settle()
            world.cache.audit()
        failures.extend(world.cache.health())
        world.cache.close()

    server = threading.Thread(target=serve)
    server.start()
    try:
        for _ in range(3):
            [row] = run(capsys, "ls", url)["namespaces"]
            assert run(capsys, "stat", url)["problems"] == []
            checked = run(capsys, "verify", url, "--repair")
            assert checked["damaged_pages"] == 0 < checked["good_pages"]
            run(capsys, "gc", url, "--size", "128KiB")
            run(capsys, "rm", url, row["namespace"], "--yes")
    finally:
        stop.set()
        server.join()
    assert failures == []
    assert run(capsys, "verify", url)["damaged_pages"] == 0
