"""A store's folder: a marker says that it is one, and only files whose names this module gives are ever touched."""

import fcntl
import json
import os
import re
from contextlib import suppress

from hicache.errors import ConfigError, StorageError
from hicache.storage.file.disk import FILE_MODE, FOLDER_MODE, entries_of, make_folders
from hicache.storage.file.records import WRITER_ID_BYTES

STORE_VERSION = 3
"""Version of the folder's layout: names, slots, records, journal."""

MARKER = "hicache-store.json"

_KIND = "hicache page store"
_NEW_MARKER = re.compile(r"\.hicache-store-[0-9a-f]{16}")
_WRITER_NAME = re.compile(r"([0-9a-f]{16})\.writer")


class Folder:
    """Names of everything in a store."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.journal_path = os.path.join(root, "journal")
        self.pages = os.path.join(root, "pages")
        self.writers = os.path.join(root, "writers")
        self.namespaces = os.path.join(root, "namespaces")

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
            make_folders(self.pages)
            make_folders(self.writers)
        except OSError as error:
            raise StorageError(f"cannot use {self.root} as a page store: {error.strerror}") from error

    def living_writers(self) -> frozenset[bytes]:
        """The ids of all stores that are open; the marks of those that ended without closing are removed."""
        alive = set()
        for item in entries_of(self.writers):
            match = _WRITER_NAME.fullmatch(item.name)
            if match is None:
                continue
            if _is_locked(item.path):
                alive.add(bytes.fromhex(match[1]))
                continue
            with suppress(FileNotFoundError):
                os.unlink(item.path)
        return frozenset(alive)

    def sync(self) -> None:
        """Returns when the names of all files are on the disk."""
        for path in (self.root, self.pages):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

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
        self.id = os.urandom(WRITER_ID_BYTES)
        self._path = os.path.join(folder.writers, f"{self.id.hex()}.writer")
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        os.fchmod(self._handle, FILE_MODE)
        fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """From now on what it was writing, or kept for itself, is anybody's to reclaim."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        os.close(self._handle)


def _is_locked(path: str) -> bool:
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
