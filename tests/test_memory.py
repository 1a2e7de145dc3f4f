"""Host memory is checked against every limit before it is touched, and given back at close."""

import mmap
import os
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest

from hicache.errors import ClosedError, ConfigError
from hicache.memory import ArenaKind, HostArena, available_memory_bytes, require_memory

MIB = 2**20


@pytest.mark.parametrize("kind", ArenaKind)
def test_an_arena_is_zeroed_writable_memory_until_it_is_closed(kind: ArenaKind) -> None:
    arena = HostArena.allocate(3 * MIB + 1, kind)
    data = arena.data
    assert (data.shape, data.dtype.name, arena.nbytes) == ((3 * MIB + 1,), "uint8", 3 * MIB + 1)
    assert not data.any()
    data[:] = 7
    arena.close()
    arena.close()
    with pytest.raises(ClosedError):
        _ = arena.data
    assert not data.any()


def test_a_shared_arena_can_be_mapped_again_by_its_descriptor() -> None:
    arena = HostArena.allocate(MIB, ArenaKind.SHARED)
    assert arena.descriptor is not None
    arena.data[5] = 9
    with mmap.mmap(arena.descriptor, MIB) as other:
        assert other[5] == 9
    descriptor = arena.descriptor
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert HostArena.allocate(MIB).descriptor is None


def test_promised_memory_counts_as_taken_until_it_is_touched_or_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.memory._system_available", lambda root: 100 * MIB)
    monkeypatch.setattr("hicache.memory._cgroup_available", lambda root: [])
    before = available_memory_bytes()
    arena = HostArena.allocate(40 * MIB)
    assert available_memory_bytes() == before - 40 * MIB
    arena.data[: 10 * MIB] = 1
    assert available_memory_bytes() == before - 30 * MIB
    with pytest.raises(ConfigError, match="host pool 'kv'"):
        HostArena.allocate(before - 29 * MIB, what="host pool 'kv'")
    arena.close()
    assert available_memory_bytes() == before


def test_an_arena_that_is_forgotten_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.memory._system_available", lambda root: 100 * MIB)
    monkeypatch.setattr("hicache.memory._cgroup_available", lambda root: [])
    before = available_memory_bytes()
    HostArena.allocate(40 * MIB)
    assert available_memory_bytes() == before


def test_the_message_names_what_was_asked_what_is_there_and_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.memory.available_memory_bytes", lambda: 3 * MIB)
    with pytest.raises(ConfigError) as error:
        require_memory(2**31, "host_size")
    assert str(error.value) == (
        "host_size: 2147483648 bytes (2.00 GiB) asked, but 3145728 bytes (3.00 MiB) can be had here;"
        " set a smaller size or raise the memory limit"
    )
    require_memory(3 * MIB, "host_size")
    with pytest.raises(ConfigError, match="at least 1"):
        require_memory(0, "host_size")


def test_what_the_system_refuses_to_map_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.memory.available_memory_bytes", lambda: 2**62)
    with pytest.raises(ConfigError, match=r"host memory: .* the system refuses it"):
        HostArena.allocate(2**60)


class Machine:
    """A made-up /proc and /sys."""

    def __init__(self, root: Path, *, available: int, cgroup: str) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 9999999 kB\nMemAvailable:   {available // 1024} kB")
        self.write("proc/self/cgroup", cgroup)

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def v2(self, folder: str, limit: object, usage: int, inactive_file: int = 0) -> None:
        self.write(f"sys/fs/cgroup/{folder}/memory.max", limit)
        self.write(f"sys/fs/cgroup/{folder}/memory.current", usage)
        self.write(f"sys/fs/cgroup/{folder}/memory.stat", f"anon 1\ninactive_file {inactive_file}")

    def v1(self, folder: str, limit: int, usage: int, inactive_file: int = 0) -> None:
        self.write(f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes", limit)
        self.write(f"sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes", usage)
        self.write(
            f"sys/fs/cgroup/memory/{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_file}"
        )


@pytest.fixture(autouse=True)
def _nothing_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.memory._open_mappings", WeakKeyDictionary())


def test_without_a_limit_the_free_memory_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=500 * MIB, cgroup="0::/")
    assert available_memory_bytes(tmp_path) == 500 * MIB
    machine.v2("", "max", 1 * MIB)
    assert available_memory_bytes(tmp_path) == 500 * MIB


def test_a_v2_limit_counts_less_what_is_used_and_can_not_be_reclaimed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=500 * MIB, cgroup="0::/app")
    machine.v2("app", 200 * MIB, 150 * MIB, 30 * MIB)
    assert available_memory_bytes(tmp_path) == 80 * MIB


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=500 * MIB, cgroup="0::/slice/app")
    machine.v2("slice/app", "max", 10 * MIB)
    machine.v2("slice", 100 * MIB, 60 * MIB)
    assert available_memory_bytes(tmp_path) == 40 * MIB


def test_in_a_container_the_mount_shows_the_inside_only(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=500 * MIB, cgroup="0::/../../kubepods/pod7")
    machine.v2("", 64 * MIB, 4 * MIB)
    assert available_memory_bytes(tmp_path) == 60 * MIB


def test_a_v1_limit_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=500 * MIB, cgroup="5:cpu,cpuacct:/a\n4:memory:/docker/x\n0::/")
    machine.v1("docker/x", 90 * MIB, 50 * MIB, 20 * MIB)
    assert available_memory_bytes(tmp_path) == 60 * MIB
    machine.v1("", 9223372036854771712, 50 * MIB)
    assert available_memory_bytes(tmp_path) == 60 * MIB


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available=500 * MIB, cgroup="0::/app")
    machine.v2("app", 100 * MIB, 110 * MIB)
    assert available_memory_bytes(tmp_path) == 0


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory_bytes() < 2**60
