"""What namespaces are is said in small private files, each whole; damaged or foreign ones are passed over."""

import os
import re
import tempfile
from contextlib import suppress

from hicache.storage.file.disk import entries_of, make_folders

MOST_LABELS = 10_000
"""Namespaces of more tenants and salts than this are not described: users must not fill the disk with names."""

_NAME = re.compile(r"([0-9a-f]{64})\.json")
_TEMPORARY = re.compile(r"\.label-.*")
_LONGEST_BYTES = 1 << 20


class Labels:
    """The folder of these files. OSError as it comes from `put` only."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def put(self, namespace: bytes, text: str) -> None:
        """Keeps a text, unless one is there or there are too many."""
        path = self._path(namespace)
        if os.path.exists(path):
            return
        make_folders(self._folder)
        if len(os.listdir(self._folder)) >= MOST_LABELS:
            return
        handle, temporary = tempfile.mkstemp(prefix=".label-", dir=self._folder)
        try:
            with open(handle, "wb") as file:
                file.write(text.encode())
            os.replace(temporary, path)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    def drop(self, namespace: bytes) -> None:
        """Forgets a text, if it is there."""
        with suppress(OSError):
            os.unlink(self._path(namespace))

    def all(self) -> dict[bytes, str]:
        """Every text that can be read."""
        found = {}
        for item in entries_of(self._folder):
            match = _NAME.fullmatch(item.name)
            if match and item.is_file(follow_symlinks=False):
                with suppress(OSError, UnicodeDecodeError), open(item.path, "rb") as file:
                    found[bytes.fromhex(match[1])] = file.read(_LONGEST_BYTES).decode()
        return found

    def drop_temporaries(self, older_than_s: float) -> int:
        """Removes what a writer that was killed left behind; returns how many. `older_than_s`: a time of day."""
        dropped = 0
        for item in entries_of(self._folder):
            with suppress(OSError):
                if _TEMPORARY.fullmatch(item.name) and item.stat(follow_symlinks=False).st_mtime < older_than_s:
                    os.unlink(item.path)
                    dropped += 1
        return dropped

    def _path(self, namespace: bytes) -> str:
        return os.path.join(self._folder, f"{namespace.hex()}.json")
