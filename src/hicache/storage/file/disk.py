"""The file store's system calls: bytes go straight between buffers and files that only their owner can read."""

import ctypes
import os
from collections.abc import Iterator, Sequence

FILE_MODE = 0o600
FOLDER_MODE = 0o700

_PARTS_PER_CALL = 512
"""Below the kernel's limit on buffers per call (1024)."""

_KEEP_SIZE = 1
_PUNCH_HOLE = 2


def _find_fallocate() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function


_fallocate = _find_fallocate()


class Disk:
    """One method per thing done to files; a subclass can make any of them fail. Errors are OSError, as they come."""

    def open(self, path: str) -> int:
        """Opens a private file for reading and writing, made if there is none; the caller closes it."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
        os.fchmod(handle, FILE_MODE)
        return handle

    def write(self, handle: int, parts: Sequence[memoryview], offset: int) -> None:
        """Writes all parts, one behind the other."""
        left = [part for part in parts if part.nbytes]
        while left:
            count = os.pwritev(handle, left[:_PARTS_PER_CALL], offset)
            offset += count
            left = _behind(left, count)

    def read(self, handle: int, parts: Sequence[memoryview], offset: int) -> bool:
        """Fills the parts; False if the file ends before."""
        left = [part for part in parts if part.nbytes]
        while left:
            count = os.preadv(handle, left[:_PARTS_PER_CALL], offset)
            if count == 0:
                return False
            offset += count
            left = _behind(left, count)
        return True

    def note(self, handle: int, data: bytes, offset: int) -> None:
        """Writes a few bytes about slots, at once."""
        if os.pwrite(handle, data, offset) != len(data):
            raise OSError("a record of the store could not be written whole")

    def allocate(self, handle: int, offset: int, size_bytes: int) -> None:
        """Takes room on the disk for a part of a file, so that writing it can't find the disk full."""
        os.posix_fallocate(handle, offset, size_bytes)

    def punch(self, handle: int, offset: int, size_bytes: int) -> None:
        """Gives the room of a part of a file back; it reads as zeros."""
        if _fallocate(handle, _KEEP_SIZE | _PUNCH_HOLE, offset, size_bytes) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def size(self, handle: int) -> int:
        """Length of a file in bytes."""
        return os.fstat(handle).st_size

    def sync(self, handle: int) -> None:
        """Returns when all that was written to the file is on the disk."""
        os.fdatasync(handle)


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
