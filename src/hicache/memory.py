"""Host arenas: checked against what this process may really use before a byte is touched, and given back at close."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from hicache.errors import ClosedError, ConfigError
from hicache.units import ByteArray


class ArenaKind(Enum):
    """What kind of memory an arena asks for."""

    PLAIN = "plain"
    HUGE = "huge"
    """Transparent huge pages, where the kernel grants them."""
    SHARED = "shared"
    """A memory file without a name, which a process that is given `descriptor` can map too."""


class HostArena:
    """One block of host memory, zero at first. `data` is uint8 [nbytes]; views of it must not outlive `close`."""

    def __init__(self, data: ByteArray, release: Callable[[], None], descriptor: int | None = None) -> None:
        self._data: ByteArray | None = data
        self._release = release
        self.nbytes = data.nbytes
        self.descriptor = descriptor

    @classmethod
    def allocate(cls, nbytes: int, kind: ArenaKind = ArenaKind.PLAIN, *, what: str = "host memory") -> "HostArena":
        """Maps `nbytes` bytes of host memory; `what` names them in messages.

        Raises ConfigError when this process can't get as much, before any of it is touched.
        """
        require_memory(nbytes, what)
        descriptor = os.memfd_create("hicache") if kind is ArenaKind.SHARED else None
        try:
            mapping = _map(nbytes, descriptor)
        except OSError as error:
            raise ConfigError(_too_little(what, nbytes, f"the system refuses it ({error})")) from error
        if kind is ArenaKind.HUGE:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        data = np.frombuffer(mapping, np.uint8)
        with _mappings_lock:
            _open_mappings[mapping] = (data.ctypes.data, nbytes)
        return cls(data, lambda: _unmap(mapping, descriptor), descriptor)

    @property
    def data(self) -> ByteArray:
        """The memory, uint8 [nbytes]. Raises ClosedError after `close`."""
        if self._data is None:
            raise ClosedError("this host memory was closed; allocate another arena")
        return self._data

    def close(self) -> None:
        """Gives the memory back. Views that are still about read zeros from now on. Again: does nothing."""
        if self._data is None:
            return
        self._data = None
        self._release()


def require_memory(nbytes: int, what: str) -> None:
    """Raises ConfigError when `nbytes` more bytes than all arenas so far can't be had; `what` names them."""
    if nbytes < 1:
        raise ConfigError(f"{what}: {nbytes} bytes asked; ask for at least 1")
    there = available_memory_bytes()
    if nbytes > there:
        raise ConfigError(_too_little(what, nbytes, f"{there} bytes ({_readable(there)}) can be had here"))


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: free memory, within every cgroup limit above it.

    What open arenas have been promised but not touched yet counts as taken. `root` is where `proc` and `sys` lie.
    """
    found = [_system_available(root), *_cgroup_available(root)]
    return max(0, min(found) - _promised_bytes())


_open_mappings: WeakKeyDictionary[mmap.mmap, tuple[int, int]] = WeakKeyDictionary()
"""Address and size of every arena mapped by this process: what was promised may not be touched yet."""

_mappings_lock = threading.Lock()
"""Held while that is changed or counted: caches may be built and closed on several threads."""


def _map(nbytes: int, descriptor: int | None) -> mmap.mmap:
    if descriptor is None:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    os.ftruncate(descriptor, nbytes)
    return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)


def _unmap(mapping: mmap.mmap, descriptor: int | None) -> None:
    with _mappings_lock:
        del _open_mappings[mapping]
    # A view that is still about keeps the mapping; the memory behind it goes back all the same.
    mapping.madvise(mmap.MADV_DONTNEED if descriptor is None else mmap.MADV_REMOVE)
    if descriptor is not None:
        os.close(descriptor)


def _promised_bytes() -> int:
    with _mappings_lock:
        return sum(nbytes - _resident_bytes(address, nbytes) for _, (address, nbytes) in _open_mappings.items())


def _resident_bytes(address: int, nbytes: int) -> int:
    pages = -(-nbytes // mmap.PAGESIZE)
    resident = np.zeros(pages, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(resident.ctypes.data))
    if status != 0:
        raise OSError(ctypes.get_errno(), "mincore failed on a host arena")
    return min(nbytes, int(np.count_nonzero(resident & 1)) * mmap.PAGESIZE)


def _system_available(root: Path) -> int:
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_available(root: Path) -> list[int]:
    """Bytes left under every memory limit, v1 and v2, of the groups this process is in."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return []
    left: list[int] = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left += _left_in(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            left += _left_in(mount, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return left


def _left_in(mount: Path, path: str, limit_file: str, usage_file: str, cache_field: str) -> list[int]:
    # In a container the path may be the one seen outside, and the mount show only the inside: what exists counts.
    group = mount / path.lstrip("/")
    left: list[int] = []
    for folder in [group, *group.parents]:
        if not folder.is_relative_to(mount):
            break
        limit = _number(folder / limit_file)
        usage = _number(folder / usage_file)
        if limit is not None and usage is not None:
            left.append(limit - usage + _reclaimable(folder / "memory.stat", cache_field))
    return left


def _number(path: Path) -> int | None:
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None


def _reclaimable(path: Path, field: str) -> int:
    if not path.exists():
        return 0
    fields = dict(line.split() for line in path.read_text().splitlines())
    return int(fields.get(field, 0))


def _too_little(what: str, nbytes: int, why: str) -> str:
    return (
        f"{what}: {nbytes} bytes ({_readable(nbytes)}) asked, but {why}; set a smaller size or raise the memory limit"
    )


def _readable(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
