"""A prefix that leaves in a file comes back bit for bit, in every kind of pool, or is refused with nothing taken."""

import json
import os
import stat
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from hicache.errors import CapacityError, ConfigError, StorageError
from hicache.storage.memory import MemoryBackend
from hicache.storage.prefix_file import read_prefix
from hicache.units import Tier
from tests.world import DERIVED, KINDS, PAGE, THREE_POOLS, World, namespace, tokens

PROMPT = tokens(*range(6 * PAGE + 3))


def exported(world: World, path: Path, prompt: bytes = PROMPT) -> int:
    world.cache.release(world.prefill(prompt))
    world.settle()
    return world.cache.export_prefix(prompt, world.namespace, path)


def refused(world: World, path: Path, reason: str, error: type[Exception] = StorageError) -> None:
    before = world.cache.digest()
    with pytest.raises(error, match=reason):
        world.cache.import_prefix(path, world.namespace)
    assert world.cache.digest() == before
    world.idle()


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_for_every_kind_of_pool(kind: str, tmp_path: Path):
    path, model = tmp_path / "prefix.safetensors", KINDS[kind]
    one = World(model)
    pages = exported(one, path)
    assert pages >= 5
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == [path.name]
    store = MemoryBackend()
    other = World(model, backend=store)
    imported = other.cache.import_prefix(path, other.namespace)
    assert imported.pages == pages and imported.new_pages > 0
    other.settle()
    assert other.cached(PROMPT)[1] == pages * PAGE
    other.serve(PROMPT)  # which compares every byte with what would be computed
    assert other.cache.import_prefix(path, other.namespace).new_pages == 0
    other.idle()
    third = World(model, backend=store)
    ticket = third.cache.prefetch(PROMPT, third.namespace)
    third.settle()
    third.serve(PROMPT, ticket)
    assert third.cached(PROMPT)[1] >= pages * PAGE
    again = tmp_path / "again"
    assert third.cache.export_prefix(PROMPT, third.namespace, again) >= pages
    for before, after in zip(read_prefix(path).pools, read_prefix(again).pools, strict=True):
        later = dict(zip(after.places, after.data, strict=True))
        shared = [
            (page, later[place]) for place, page in zip(before.places, before.data, strict=True) if place in later
        ]
        assert before.pool == after.pool and shared
        assert all(np.array_equal(*pair) for pair in shared)


def test_what_only_the_device_or_only_the_store_has_is_exported(tmp_path: Path):
    for write_policy, backend in (("write_back", None), ("write_through", MemoryBackend())):
        world = World(THREE_POOLS, write_policy=write_policy, backend=backend)
        world.cache.release(world.prefill(PROMPT))
        world.settle()
        if backend is not None:
            for tier in (Tier.DEVICE, Tier.HOST):
                world.cache.evict(tier)
        assert world.cache.export_prefix(PROMPT, world.namespace, tmp_path / write_policy) == 6
        world.idle()


def test_room_bounds_what_is_taken(tmp_path: Path):
    path = tmp_path / "prefix"
    assert exported(World(), path) == 6
    small = World(host_pages=4)
    assert small.cache.import_prefix(path, small.namespace).pages == 4
    assert small.cached(PROMPT)[1] == 4 * PAGE
    small.serve(PROMPT)
    small.settle()
    small.idle()


def test_every_flipped_byte_cut_and_addition_is_refused(tmp_path: Path):
    path = tmp_path / "prefix"
    exported(World(DERIVED), path, tokens(*range(PAGE + 1 + DERIVED.draft_lookahead)))
    raw, world = path.read_bytes(), World(DERIVED)
    assert world.cache.import_prefix(path, world.namespace).pages == 1
    fresh = World(DERIVED)
    with path.open("r+b", buffering=0) as file:
        for at in range(len(raw)):
            os.pwrite(file.fileno(), bytes([raw[at] ^ (1 << at % 8)]), at)
            with pytest.raises(StorageError):
                fresh.cache.import_prefix(path, fresh.namespace)
            os.pwrite(file.fileno(), raw[at : at + 1], at)
    for content in (*(raw[:length] for length in range(0, len(raw), 31)), raw + b"\0", raw + raw):
        path.write_bytes(content)
        with pytest.raises(StorageError):
            fresh.cache.import_prefix(path, fresh.namespace)
    assert fresh.cached(tokens(*range(PAGE + 1 + DERIVED.draft_lookahead)))[1] == 0


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model": "x"}, "another model: 'test' there, 'x' here"),
        ({"weights": "1" * 64}, "another weights"),
        ({"dtype": "float16"}, "another dtype"),
        ({"geometry": "g"}, "another geometry"),
        ({"page_size": 8}, "another page_size: 4 there, 8 here"),
        ({"adapter": "a"}, "another adapter"),
        ({"salt": "pepper"}, "another salt; nothing"),
        ({"tenant": "t"}, "another tenant"),
        ({"shard": "1/2"}, "another shard"),
    ],
)
def test_a_foreign_prefix_is_refused_by_name(tmp_path: Path, other: dict[str, Any], reason: str):
    path, world = tmp_path / "prefix", World()
    exported(world, path)
    fresh = World()
    fresh.namespace = replace(namespace(), **other)
    refused(fresh, path, reason, ConfigError)


def lie(path: Path, change) -> None:
    """Changes what a file says of itself, and seals it anew as anybody could."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["hicache"])
    tensors = load(raw)
    change(header, tensors)
    body = save(tensors, {"hicache": json.dumps(header)})[:-32]
    path.write_bytes(body + sha256(body).digest())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda header, tensors: header.update(pages=7), "tokens for 7 pages"),
        (lambda header, tensors: header.update(format=2), "of format 2"),
        (lambda header, tensors: header["keys"].reverse(), "page keys"),
        (lambda header, tensors: header["namespace"].update(model="other"), "page keys"),
        (lambda header, tensors: header["namespace"].update(page_size=0), "namespace is not whole"),
        (lambda header, tensors: header["pools"][0].update(page_bytes=1 << 40), "another shape"),
        (lambda header, tensors: header["pools"][0]["places"].__setitem__(0, 99), "places that are none"),
        (lambda header, tensors: header["pools"][0]["crc32c"].__setitem__(2, 1), "page 2 of pool 'kv' is damaged"),
        (lambda header, tensors: header.update(pools=[]), "other tensors"),
        (lambda header, tensors: header.pop("keys"), "no file that hicache exported"),
        (lambda header, tensors: tensors.update(tokens=tensors["tokens"].astype("<u8")), "no tensor 'tokens'"),
        (lambda header, tensors: tensors.update({"../../x": tensors["pool.0000"]}), "other tensors"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, change, reason: str):
    path = tmp_path / "prefix"
    exported(World(), path)
    lie(path, change)
    refused(World(), path, reason)


def test_pools_that_are_other_here_are_refused(tmp_path: Path):
    path = tmp_path / "prefix"
    exported(World(), path)
    lie(path, lambda header, tensors: header["pools"][0].update(name="../kv"))
    refused(World(), path, "a pool '../kv'", ConfigError)
    exported(World(), path)
    lie(path, lambda header, tensors: header["pools"][0].update(layout="0" * 64))
    refused(World(), path, "pool 'kv' has another layout", ConfigError)


def test_paths_that_are_no_files(tmp_path: Path):
    world, real = World(), tmp_path / "real"
    exported(world, real)
    link = tmp_path / "link"
    link.symlink_to(real)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "absent", "."):
        refused(World(), tmp_path / name, "cannot read|not a regular file")
    target = tmp_path / "target"
    target.write_text("mine")
    link.unlink()
    link.symlink_to(target)
    world.cache.export_prefix(PROMPT, world.namespace, link)
    assert target.read_text() == "mine" and not link.is_symlink()
    with pytest.raises(StorageError, match="cannot write"):
        world.cache.export_prefix(PROMPT, world.namespace, tmp_path / "no" / "folder")


def test_what_is_not_there_is_not_exported(tmp_path: Path):
    with pytest.raises(CapacityError, match="nothing that can be resumed"):
        World().cache.export_prefix(PROMPT, namespace(), tmp_path / "x")
    with pytest.raises(ConfigError, match="less than a page"):
        World().cache.export_prefix(tokens(1), namespace(), tmp_path / "x")
    assert os.listdir(tmp_path) == []
