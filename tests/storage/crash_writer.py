"""What a writer that is going to be killed does: it says what it begins and what was acknowledged."""

import itertools
import random
from collections.abc import Sequence
from multiprocessing.connection import Connection

from hicache.storage.file import FileBackend
from hicache.testing.storage import sample_chain

KEYS = sample_chain(12)
SIZES = [300, 5000, 20_000] * 4
"""Each value has a size of its own, so that files of all kinds of slots are in use."""


def value_of(version: int, size_bytes: int) -> bytes:
    """A value that says throughout which version of its key it is."""
    return (b"%019d\n" % version * (size_bytes // 20 + 1))[:size_bytes]


def version_in(value: bytes) -> int:
    """Fails the test unless all of the value is of one version."""
    version = int(value[:19])
    assert value == value_of(version, len(value)), "bytes of several values"
    return version


def write_until_killed(root: str, seed: int, first_version: int, told: Connection) -> None:
    """Sends (step, kind, versions by key number) before, and (step, "done", acknowledged key numbers) after each."""
    source = random.Random(seed)
    backend = FileBackend(root)
    for step in itertools.count():
        chosen = sorted(source.sample(range(len(KEYS)), source.randint(1, 6)))
        kind = source.choice(["write", "write", "write", "write", "delete", "read", "sync"])
        version = first_version + step
        told.send((kind, chosen, version))
        done = _do(backend, kind, chosen, version)
        told.send(("done", done, version))


def _do(backend: FileBackend, kind: str, chosen: Sequence[int], version: int) -> list[int]:
    keys = [KEYS[i] for i in chosen]
    if kind == "sync":
        backend.sync()
        return []
    if kind == "read":
        buffers = [bytearray(SIZES[i]) for i in chosen]
        backend.read(keys, [[memoryview(buffer)] for buffer in buffers])
        return []
    if kind == "delete":
        backend.delete(keys)
        return list(chosen)
    values = [[memoryview(value_of(version, SIZES[i]))] for i in chosen]
    return [i for i, yes in zip(chosen, backend.write(keys, values), strict=True) if yes]
