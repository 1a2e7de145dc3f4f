"""A store's folder: a marker says that it is one, and only files whose names this module gives are ever touched."""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from hicache.errors import ConfigError, StorageError
from hicache.storage.chains import PAGE_ID_BYTES, POOL_ID_BYTES, EntryId
from hicache.storage.file.disk import FILE_MODE, FOLDER_MODE, entries_of, make_folders

STORE_VERSION = 2
"""Version of the folder's layout: names, folders, journal."""

MARKER = "hicache-store.json"

_KIND = "hicache page store"
_NEW_MARKER = re.compile(r"\.hicache-store-[0-9a-f]{16}")
_PAGE_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{16})")
_TEMP_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{96})-([0-9a-f]{1,16})")
_WRITER_NAME = re.compile(r"([0-9a-f]{16})\.writer")


@dataclass(frozen=True, slots=True)
class Temp:
    """A value being written: by whom, which entry, how many bytes it will have."""

    path: str
    writer: str
    entry: EntryId
    size_bytes: int


class Folder:
    """Names of everything in a store. Page files lie in 256 folders, two levels of one hex digit each."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.journal_path = os.path.join(root, "journal")
        self._pages = os.path.join(root, "pages")
        self._temps = os.path.join(root, "tmp")

    def claim(self) -> None:
        """Makes the folder a store, or checks that it is one.

        Raises ConfigError, and touches nothing, if it holds a store of another version or files that are not a store's;
        StorageError if it can't be read or made.
        """
        try:
            make_folders(self.root)
            names = {entry.name for entry in entries_of(self.root)}
            if MARKER not in names:
                self._refuse_foreign(names)
                self._write_marker()
            self._check_marker()
            for name in filter(_NEW_MARKER.fullmatch, names):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.root, name))
            make_folders(self._pages)
            make_folders(self._temps)
        except OSError as error:
            raise StorageError(f"cannot use {self.root} as a page store: {error.strerror}") from error

    def page_path(self, entry: EntryId) -> str:
        """Where the entry's value lies: hex digits of digests, whatever names the key was made of."""
        digits = entry.hex()
        first, second = 2 * PAGE_ID_BYTES, 4 * PAGE_ID_BYTES
        third = second + 2 * POOL_ID_BYTES
        name = f"{digits[:first]}-{digits[first:second]}-{digits[second:third]}-{digits[third:]}"
        return f"{self._pages}/{digits[0]}/{digits[1]}/{name}"

    def pages(self) -> Iterator[tuple[EntryId, os.stat_result]]:
        """All page files with size and times; reads no file. What isn't a page file in its place is passed over."""
        for first in "0123456789abcdef":
            for second in "0123456789abcdef":
                for item in entries_of(f"{self._pages}/{first}/{second}"):
                    match = _PAGE_NAME.fullmatch(item.name)
                    if match is None or item.name[:2] != first + second:
                        continue
                    if item.is_file(follow_symlinks=False):
                        # A file may go while it is listed.
                        with suppress(FileNotFoundError):
                            yield bytes.fromhex("".join(match.groups())), item.stat(follow_symlinks=False)

    def temp_path(self, writer: str, number: int, entry: EntryId, size_bytes: int) -> str:
        """Where a writer puts a value until it is whole. The name says what the others must know if the writer dies."""
        return f"{self._temps}/{writer}-{number:016x}-{entry.hex()}-{size_bytes:x}"

    def temps(self) -> Iterator[Temp]:
        """All values being written, by writers dead or alive."""
        for item in entries_of(self._temps):
            match = _TEMP_NAME.fullmatch(item.name)
            if match is not None and item.is_file(follow_symlinks=False):
                yield Temp(item.path, match[1], bytes.fromhex(match[3]), int(match[4], 16))

    def reclaim(self) -> int:
        """Removes what dead writers left; returns how many files. In a journal's turn only."""
        writers = [
            (item.path, match[1]) for item in entries_of(self._temps) if (match := _WRITER_NAME.fullmatch(item.name))
        ]
        dead = {name: path for path, name in writers if not _is_alive(path)}
        alive = {name for _, name in writers if name not in dead}
        stale = [temp.path for temp in self.temps() if temp.writer not in alive] + list(dead.values())
        for path in stale:
            with suppress(FileNotFoundError):
                os.unlink(path)
        return len(stale)

    def _refuse_foreign(self, names: set[str]) -> None:
        foreign = sorted(name for name in names if not _NEW_MARKER.fullmatch(name))
        if foreign:
            raise ConfigError(
                f"{self.root} is not empty and is not a page store (it holds {foreign[0]!r}); "
                "give a new or empty folder, for instance a subfolder of it"
            )

    def _write_marker(self) -> None:
        os.chmod(self.root, FOLDER_MODE)
        temp = os.path.join(self.root, f".hicache-store-{os.urandom(8).hex()}")
        with open(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE), "wb") as file:
            os.fchmod(file.fileno(), FILE_MODE)
            file.write(json.dumps({"kind": _KIND, "version": STORE_VERSION}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        # Another process that opens the new store removes our file only after the marker is there.
        with suppress(FileNotFoundError):
            os.replace(temp, os.path.join(self.root, MARKER))

    def _check_marker(self) -> None:
        path = os.path.join(self.root, MARKER)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            content = file.read(4096)
        try:
            marker = json.loads(content)
        except ValueError:
            marker = None
        if not isinstance(marker, dict) or marker.get("kind") != _KIND:
            raise ConfigError(f"{path} is damaged or not ours: move {self.root} away, or give another folder")
        if marker.get("version") != STORE_VERSION:
            raise ConfigError(
                f"{self.root} holds a page store of version {marker.get('version')!r}, this hicache uses version "
                f"{STORE_VERSION}: give another folder, or use the hicache that wrote it"
            )


class Writer:
    """One open store: a locked file shows the others that it is alive, and goes with the process however that ends."""

    def __init__(self, folder: Folder) -> None:
        self.name = os.urandom(8).hex()
        self._path = f"{os.path.dirname(folder.temp_path(self.name, 0, b'', 0))}/{self.name}.writer"
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        os.fchmod(self._handle, FILE_MODE)
        fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """No temporary file of this writer is left when this is called."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        os.close(self._handle)


def _is_alive(path: str) -> bool:
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
