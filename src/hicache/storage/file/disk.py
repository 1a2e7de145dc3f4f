"""The file store's system calls: bytes go straight between buffers and files that only their owner can read."""

import os
from collections.abc import Iterator, Sequence

FILE_MODE = 0o600
FOLDER_MODE = 0o700

_PARTS_PER_CALL = 512
"""Below the kernel's limit on buffers per call (1024)."""


class Disk:
    """One method per thing done to files; a subclass can make any of them fail. Errors are OSError, as they come."""

    def create(self, path: str) -> int:
        """Opens a new private file for writing; the caller closes it. FileExistsError if there is one."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        os.fchmod(handle, FILE_MODE)
        return handle

    def write(self, handle: int, parts: Sequence[memoryview]) -> None:
        """Writes all parts from the start of the file."""
        offset = 0
        left = [part for part in parts if part.nbytes]
        while left:
            count = os.pwritev(handle, left[:_PARTS_PER_CALL], offset)
            offset += count
            left = _behind(left, count)

    def read(self, path: str, parts: Sequence[memoryview]) -> int:
        """Fills the parts from the start of the file; returns the file's length in bytes, whether it fits or not."""
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            left = [part for part in parts if part.nbytes]
            offset = 0
            while left:
                count = os.preadv(handle, left[:_PARTS_PER_CALL], offset)
                if count == 0:
                    return offset
                offset += count
                left = _behind(left, count)
            return os.fstat(handle).st_size
        finally:
            os.close(handle)

    def replace(self, source: str, target: str) -> None:
        """Gives a file its name, in place of an older file, at once; makes the folder if there is none."""
        try:
            os.replace(source, target)
        except FileNotFoundError:
            make_folders(os.path.dirname(target))
            os.replace(source, target)

    def remove(self, path: str) -> None:
        """Removes a file. FileNotFoundError if there is none."""
        os.unlink(path)

    def status(self, path: str) -> os.stat_result:
        """Size and times of a file (not of what a link points to)."""
        return os.stat(path, follow_symlinks=False)

    def touch(self, path: str, used_ns: int) -> None:
        """Notes when a file was last used, for the next start."""
        os.utime(path, ns=(used_ns, used_ns), follow_symlinks=False)


def make_folders(path: str) -> None:
    """Makes a folder, and those above it that are missing, private to the user whatever the umask."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_folders(parent)
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        return
    os.chmod(path, FOLDER_MODE)


def entries_of(folder: str) -> Iterator[os.DirEntry[str]]:
    """What lies in a folder; nothing if there is no such folder."""
    try:
        with os.scandir(folder) as listing:
            yield from listing
    except FileNotFoundError:
        return


def _behind(parts: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """What is left of the parts when their first bytes are done."""
    for i, part in enumerate(parts):
        if done_bytes < part.nbytes:
            return [part[done_bytes:], *parts[i + 1 :]]
        done_bytes -= part.nbytes
    return []
