"""Small tools for tests of stores: pages whose bytes name their key, folders measured, disks that fail."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache.storage import PageStore, StorageKey
from hicache.storage.chains import entry_id
from hicache.storage.codec import HEADER_BYTES
from hicache.storage.file.disk import Disk
from hicache.storage.file.journal import Place
from hicache.storage.file.records import RECORD_BYTES, USED_OFFSET, Record, State, decode, encode_used
from hicache.storage.file.slot_file import slot_size
from hicache.testing.storage import sample_value

PAGE_BYTES = 3000

SLOT_BYTES = slot_size(PAGE_BYTES + HEADER_BYTES)
"""What a page of PAGE_BYTES takes in a file store."""

REPOSITORY = Path(__file__).parents[2]
"""Where a new process finds these tools."""


def page(key: StorageKey, size_bytes: int = PAGE_BYTES) -> memoryview:
    return memoryview(bytearray(sample_value(key, size_bytes)))


def store_pages(store: PageStore, keys: Sequence[StorageKey], size_bytes: int = PAGE_BYTES) -> list[bool]:
    return [bool(yes) for yes in store.write(keys, [page(key, size_bytes) for key in keys])]


def load_pages(store: PageStore, keys: Sequence[StorageKey], size_bytes: int = PAGE_BYTES) -> list[bool]:
    """Which pages came back ok; fails the test if one of them has wrong bytes."""
    buffers = [memoryview(bytearray(size_bytes)) for _ in keys]
    result = store.read(keys, buffers)
    for key, buffer, ok in zip(keys, buffers, result.ok, strict=True):
        assert not ok or buffer == page(key, size_bytes), "a page with wrong bytes was called ok"
    return [bool(yes) for yes in result.ok]


@dataclass(frozen=True)
class Spot:
    """Where a value lies: in the slots of one size, from `offset` of their file on."""

    root: Path
    slot_bytes: int
    slot: int
    value_bytes: int

    @property
    def path(self) -> Path:
        return self.root / "pages" / f"{self.slot_bytes:012x}.slots"

    @property
    def offset(self) -> int:
        return self.slot * self.slot_bytes

    def position(self, i: int) -> int:
        """Where the value's byte `i` lies in the file: the first 256 come last."""
        lead = min(256, self.value_bytes)
        return self.offset + (i - lead) % self.value_bytes

    def flip(self, i: int, mask: int = 0x10) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.position(i))
            [byte] = file.read(1)
            file.seek(self.position(i))
            file.write(bytes([byte ^ mask]))

    def content(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.value_bytes)

    def overwrite(self, content: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            file.write(content)

    def cut(self, left_bytes: int) -> None:
        """Ends the file so many bytes into the value; what lies behind is gone as well."""
        os.truncate(self.path, self.offset + left_bytes)


def records(root: Path) -> dict[Place, tuple[Record, int]]:
    """What the records of a store say, with the times of last use."""
    found = {}
    for path in sorted((root / "pages").glob("*.index")):
        data = path.read_bytes()
        for slot in range(-(-len(data) // RECORD_BYTES)):
            known = decode(data[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES])
            if known is not None:
                found[Place(int(path.stem, 16), slot)] = known
    return found


def find_spot(root: Path, key: StorageKey) -> Spot | None:
    """Where a stored page lies, None if it isn't stored."""
    for place, (record, _) in records(root).items():
        if record.state is State.STORED and record.entry == entry_id(key):
            return Spot(root, place.slot_bytes, place.slot, record.value_bytes)
    return None


def spot(root: Path, key: StorageKey) -> Spot:
    found = find_spot(root, key)
    assert found is not None, "the page is not stored"
    return found


def set_used(root: Path, key: StorageKey, used_ns: int) -> None:
    """Sets when a page was last used."""
    where = spot(root, key)
    with where.path.with_suffix(".index").open("r+b") as file:
        file.seek(where.slot * RECORD_BYTES + USED_OFFSET)
        file.write(encode_used(used_ns))


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def value_bytes(root: Path) -> int:
    """Bytes of the slots of all values, whole or being written."""
    busy = (State.RESERVED, State.STORED)
    return sum(place.slot_bytes for place, (record, _) in records(root).items() if record.state in busy)


def disk_bytes(root: Path) -> int:
    """What all slots really take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in (root / "pages").glob("*.slots"))


def writers(root: Path) -> list[Path]:
    """The marks of the stores that are open, or were not closed."""
    return files_below(root / "writers")


class FailingDisk(Disk):
    """Raises `errors[method]`, an errno, as long as it is set; counts every call."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def _enter(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if name in self.errors:
            raise OSError(self.errors[name], os.strerror(self.errors[name]))

    def write(self, handle: int, parts: Sequence[memoryview], offset: int) -> None:
        if "write" in self.errors:
            super().write(handle, [parts[0][: parts[0].nbytes // 2]], offset)
        self._enter("write")
        super().write(handle, parts, offset)

    def read(self, handle: int, parts: Sequence[memoryview], offset: int) -> bool:
        self._enter("read")
        return super().read(handle, parts, offset)

    def note(self, handle: int, data: bytes, offset: int) -> None:
        self._enter("note")
        super().note(handle, data, offset)

    def allocate(self, handle: int, offset: int, size_bytes: int) -> None:
        self._enter("allocate")
        super().allocate(handle, offset, size_bytes)

    def punch(self, handle: int, offset: int, size_bytes: int) -> None:
        self._enter("punch")
        super().punch(handle, offset, size_bytes)

    def size(self, handle: int) -> int:
        self._enter("size")
        return super().size(handle)

    def sync(self, handle: int) -> None:
        self._enter("sync")
        super().sync(handle)


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
