"""Bytes move between registered memory and open files; one transfer at a time, and it has ended when a call returns."""

import threading
import time
from collections.abc import Sequence
from typing import Any, TypeAlias
from uuid import uuid4

import nixl_cu12._bindings as bindings
from nixl_cu12 import nixl_agent, nixl_agent_config

from hicache.errors import StorageError
from hicache.storage.registered import Lent, RegisteredMemory

_POLL_S = 0.0001

_Region: TypeAlias = tuple[int, int, int]
"""Address or offset, bytes, and device or file."""

QUEUES = {"uring": "use_uring", "aio": "use_aio", "posix": "use_posix_aio"}
"""How the kernel is asked, and what the plug-in calls it."""

ERRORS: tuple[type[Exception], ...] = tuple(
    error
    for error in vars(bindings).values()
    if isinstance(error, type) and issubclass(error, Exception) and error.__module__ == bindings.__name__
)
"""Everything that the engine raises by itself: the classes have no common base."""


class Engine:
    """The POSIX plug-in of a NIXL agent. Thread-safe. `queue` is a key of QUEUES."""

    def __init__(self, queue: str) -> None:
        self._lock = threading.RLock()
        self._name = f"hicache-{uuid4()}"
        self._regions: dict[int, Any] = {}
        try:
            self._agent = nixl_agent(self._name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend("POSIX", {QUEUES[queue]: "true"})
        except ERRORS as error:
            others = ", ".join(f"queue={name}" for name in QUEUES if name != queue)
            raise StorageError(f"NIXL cannot use queue={queue} on this machine ({error}); try {others}") from error
        self.memory = RegisteredMemory(self._register, self._unregister)

    def write(self, files: Sequence[int], values: Sequence[Lent]) -> bool:
        """Each value into the open file beside it, from its start; False: some are not, or not whole."""
        return self._move("WRITE", files, values)

    def read(self, files: Sequence[int], values: Sequence[Lent]) -> bool:
        """Each value out of the open file beside it, from its start; False: some are not, or not whole."""
        return self._move("READ", files, values)

    def close(self) -> None:
        """Takes memory back from the engine."""
        self.memory.clear()

    def _move(self, operation: str, files: Sequence[int], values: Sequence[Lent]) -> bool:
        memory: list[_Region] = []
        places: list[_Region] = []
        for file, value in zip(files, values, strict=True):
            offset = 0
            for address, nbytes in zip(value.addresses, value.sizes, strict=True):
                memory.append((address, nbytes, 0))
                places.append((offset, nbytes, file))
                offset += nbytes
        if not memory:
            return True
        whole = [(0, max(value.nbytes, 1), file, "") for file, value in zip(files, values, strict=True)]
        with self._lock:
            region = self._agent.register_memory(whole, "FILE", ["POSIX"])
            try:
                return self._run(operation, memory, places)
            finally:
                self._agent.deregister_memory(region, ["POSIX"])

    def _run(
        self, operation: str, memory: Sequence[tuple[int, int, int]], places: Sequence[tuple[int, int, int]]
    ) -> bool:
        source = self._agent.get_xfer_descs(memory, "DRAM")
        target = self._agent.get_xfer_descs(places, "FILE")
        transfer = self._agent.initialize_xfer(operation, source, target, self._name, backends=["POSIX"])
        try:
            state = self._agent.transfer(transfer)
            while state == "PROC":
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(transfer)
        except ERRORS:
            # The bindings raise for a transfer that ended short or with an error.
            return False
        finally:
            self._agent.release_xfer_handle(transfer)
        return bool(state == "DONE")

    def _register(self, address: int, nbytes: int) -> None:
        with self._lock:
            try:
                self._regions[address] = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM", ["POSIX"])
            except ERRORS as error:
                raise StorageError(f"{nbytes} bytes of host memory cannot be registered with NIXL: {error}") from error

    def _unregister(self, address: int) -> None:
        with self._lock:
            self._agent.deregister_memory(self._regions.pop(address), ["POSIX"])
