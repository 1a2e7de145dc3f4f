"""What is measured moves the same pages in the same batches, whether it is a store or a plain file."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from hicache.errors import StorageError
from hicache.keys import page_keys
from hicache.storage import PageStore, StorageKey, chain_keys, open_store
from hicache.storage.registry import parse_location

Pages: TypeAlias = Sequence[memoryview]

POOL = "kv"

_FOLDER_SCHEMES = ("file", "nixl-posix")
"""Stores whose path is a folder of this machine: their files can be dropped from the page cache."""


class Subject(Protocol):
    """Pages are named by their numbers. Calls may come from several threads, with pages of their own each."""

    def put(self, first: int, pages: Pages) -> None:
        """Stores pages, numbered from `first` on."""

    def get(self, first: int, pages: Pages) -> None:
        """Fills pages, numbered from `first` on."""

    def look_up(self, count: int) -> None:
        """Asks for the first `count` pages whether they are there."""

    def files(self) -> list[Path]:
        """The files that hold the bytes, for them to be dropped from the page cache; none if they are not ours."""


@dataclass(frozen=True)
class StoreSubject:
    """A store of hicache, with headers, checksums and look-ups, as a cache uses it."""

    store: PageStore
    keys: Sequence[StorageKey]
    folder: Path | None

    def put(self, first: int, pages: Pages) -> None:
        """Raises StorageError if a page is refused."""
        if not self.store.write(self.keys[first : first + len(pages)], pages).all():
            raise StorageError(f"the store refused pages: {'; '.join(self.store.health()) or 'give it a larger cap'}")

    def get(self, first: int, pages: Pages) -> None:
        """Raises StorageError if a page does not come back."""
        if not self.store.read(self.keys[first : first + len(pages)], pages).ok.all():
            raise StorageError("the store did not give back what it was given")

    def look_up(self, count: int) -> None:
        """Raises StorageError if one is not there."""
        if not self.store.contains(self.keys[:count]).all():
            raise StorageError("the store does not have what it was given")

    def files(self) -> list[Path]:
        """All files below the folder, if the store is one."""
        return [] if self.folder is None else [path for path in self.folder.rglob("*") if path.is_file()]


@dataclass(frozen=True)
class RawSubject:
    """One preallocated file, and nothing but pwritev and preadv: what the disk and the page cache allow."""

    path: Path
    handle: int
    page_bytes: int

    def put(self, first: int, pages: Pages) -> None:
        """Writes each page in one call."""
        for i, page in enumerate(pages, first):
            os.pwritev(self.handle, [page], i * self.page_bytes)

    def get(self, first: int, pages: Pages) -> None:
        """Reads each page in one call."""
        for i, page in enumerate(pages, first):
            os.preadv(self.handle, [page], i * self.page_bytes)

    def look_up(self, count: int) -> None:
        """There is nothing to ask."""

    def files(self) -> list[Path]:
        """The file."""
        return [self.path]


@contextmanager
def opened_store(url: str, count: int) -> Iterator[StoreSubject]:
    """A store with keys that it has not seen; what was put is taken away at the end."""
    namespace = os.urandom(32)
    tokens = b"".join(i.to_bytes(4, "little") for i in range(count))
    keys = chain_keys(namespace, POOL, namespace, page_keys(namespace, tokens, 1))
    location = parse_location(url, {})
    folder = Path(location.path).expanduser() if location.scheme in _FOLDER_SCHEMES else None
    with closing(PageStore(open_store(url))) as store:
        try:
            yield StoreSubject(store, keys, folder)
        finally:
            store.clear(namespace)


@contextmanager
def opened_raw(folder: Path, page_bytes: int, count: int) -> Iterator[RawSubject]:
    """A file of its own in the folder, gone at the end."""
    path = folder / "raw"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(handle, 0, page_bytes * count)
        yield RawSubject(path, handle, page_bytes)
    finally:
        os.close(handle)
        path.unlink()
