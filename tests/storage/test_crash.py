"""Killed at any moment, or cut off from power: no wrong byte, and what was acknowledged (then: and synced) is there."""

import multiprocessing
import random
import shutil
import time
from pathlib import Path

import pytest

from hicache.storage import PageStore
from hicache.storage.file import FileBackend
from hicache.storage.file.slot_file import slot_size
from hicache.testing.storage import get, sample_chain
from tests.storage.crash_writer import KEYS, SIZES, version_in, write_until_killed
from tests.storage.support import disk_bytes, find_spot, load_pages, store_pages, writers

ALL_BYTES = sum(map(slot_size, SIZES))

States = dict[int, set[int | None]]
"""By key number: the versions that may be there, None for no value."""


def follow(told: list[tuple[str, list[int], int]], states: States) -> None:
    """Takes in what a writer said until it was killed."""
    kind = "done"
    for event, chosen, version in told:
        if event == "done":
            for i in chosen:
                states[i] = {None if kind == "delete" else version}
        elif event in ("write", "delete"):
            for i in chosen:
                states[i] = states[i] | {None if event == "delete" else version}
        kind = event


def run_and_kill(root: Path, source: random.Random, first_version: int) -> list[tuple[str, list[int], int]]:
    """What a new writer told until it was killed, some milliseconds after its first word."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.storage.crash_writer"])
    here, there = context.Pipe(duplex=False)
    writer = context.Process(
        target=write_until_killed, args=(str(root), source.randrange(1 << 30), first_version, there)
    )
    writer.start()
    there.close()
    told = [here.recv()]
    time.sleep(source.uniform(0.0, 0.05))
    writer.kill()
    writer.join()
    try:
        while True:
            told.append(here.recv())
    except (EOFError, OSError):
        here.close()
        return told


def check(backend: FileBackend, states: States) -> States:
    """What is there now, each key exactly; fails the test if it may not be."""
    found: States = {}
    for i, allowed in states.items():
        value = get(backend, KEYS[i], SIZES[i])
        version = None if value is None else version_in(value)
        assert version in allowed, f"key {i} has version {version}, not one of {allowed}"
        assert backend.contains([KEYS[i]])[0] == (version is not None)
        found[i] = {version}
    return found


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.full)])
def test_kills_at_random_moments(tmp_path: Path, kills: int):
    """A process that was there all the time agrees with one that opens the store afterwards."""
    source, versions = random.Random(kills), 0
    witness = FileBackend(tmp_path)
    states: States = {i: {None} for i in range(len(KEYS))}
    for _ in range(kills):
        told = run_and_kill(tmp_path, source, versions)
        versions = max(version for _, _, version in told) + 1
        follow(told, states)
        backend = FileBackend(tmp_path)
        found = check(backend, states)
        assert check(witness, states) == found
        assert len(writers(tmp_path)) == 2
        used_bytes = sum(slot_size(SIZES[i]) for i, its in found.items() if its != {None})
        assert backend.used_bytes == used_bytes, "what was being written when it was killed has been freed"
        assert backend.disk_bytes <= 3 * ALL_BYTES
        assert disk_bytes(tmp_path) <= 3 * ALL_BYTES
        backend.close()
        states = found
    witness.close()
    assert versions > 2 * kills


def mix(old: Path, new: Path, target: Path, source: random.Random) -> None:
    """What a disk may hold after a power cut: of all that was written since the sync, some blocks and not others."""
    shutil.copytree(new, target)
    for path in sorted(target.rglob("*")):
        if not path.is_file():
            continue
        before = old / path.relative_to(target)
        old_bytes = before.read_bytes() if before.exists() else b""
        new_bytes = path.read_bytes()
        length = source.choice([len(new_bytes), max(len(old_bytes), source.randint(0, len(new_bytes)))])
        mixed = bytearray(length)
        for start in range(0, length, 512):
            chosen = source.choice([old_bytes, new_bytes])[start : start + 512]
            mixed[start : start + len(chosen)] = chosen[: length - start]
        path.write_bytes(mixed)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 60))])
def test_a_power_cut_takes_nothing_that_was_synced_and_left_alone(tmp_path: Path, seed: int):
    """What came later may be torn in any way: each page is right, or a miss that can be written again."""
    source, size_bytes = random.Random(seed), 5000
    root = tmp_path / "store"
    kept, dropped, later = (sample_chain(6, chain=name) for name in ("kept", "dropped", "later"))
    backend = FileBackend(root)
    store = PageStore(backend)
    assert all(store_pages(store, [*kept, *dropped], size_bytes))
    backend.sync()
    shutil.copytree(root, tmp_path / "synced")
    store.delete(source.sample(dropped, 4))
    assert all(store_pages(store, later, size_bytes))
    store.delete(source.sample(later, 2))
    mix(tmp_path / "synced", root, tmp_path / "cut", source)
    store.close()
    store = PageStore(FileBackend(tmp_path / "cut"))
    assert load_pages(store, kept, size_bytes) == [True] * 6
    for keys in (dropped, later):
        load_pages(store, keys, size_bytes)
        assert store_pages(store, keys, size_bytes) == load_pages(store, keys, size_bytes) == [True] * 6
    assert load_pages(store, kept, size_bytes) == [True] * 6
    assert all(find_spot(tmp_path / "cut", key) is not None for key in [*kept, *dropped, *later])
    store.close()
