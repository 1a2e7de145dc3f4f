"""A client is connected or says why not; it is connected anew by the next call that needs it."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from hicache.errors import StorageError
from hicache.storage.mooncake.guard import Guard
from hicache.storage.registered import RegisteredMemory
from hicache.storage.remote import Deadline

T = TypeVar("T")

_PROBE = """
import os, sys
from mooncake.store import MooncakeDistributedStore
host, metadata, protocol, device, master = sys.argv[1:]
code = MooncakeDistributedStore().setup(host, metadata, 0, 1 << 24, protocol, device, master)
os._exit(1 if code else 0)
"""
"""Joins and leaves, in a process that can be ended."""

_LOCAL_BUFFER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where the store's master is and what this process is in it."""

    master: str
    metadata: str
    host: str
    protocol: str
    device: str
    segment_bytes: int
    """Memory that this process adds to the store; what lies there goes with the process."""
    replicas: int


class Client:
    """The native client. Calls that have no time limit run under a guard; OSError: it was not answered."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._guard = Guard()
        self._lock = threading.Lock()
        self._store: Any = None
        self._arenas: list[memoryview] = []
        self.memory = RegisteredMemory(self._register, self._unregister)

    def call(self, deadline: Deadline, call: Callable[[Any], T]) -> T:
        """What `call(native store)` returns; it must touch no memory that is lent for this call only."""
        store = self.connected(deadline)
        return self._guard.call(lambda: call(store), deadline)

    def connected(self, deadline: Deadline) -> Any:
        """The native store."""
        if not self._lock.acquire(timeout=deadline.left_s()):
            raise TimeoutError("does not answer: another call is still connecting")
        try:
            if self._store is None:
                self._require_master(deadline)
                self._store = self._guard.call(self._connect, deadline)
                self.memory.add(self._arenas)
            return self._store
        finally:
            self._lock.release()

    def add_arenas(self, arenas: Sequence[memoryview]) -> None:
        """Memory that is lent again and again: registered now, or as soon as there is a connection."""
        with self._lock:
            self._arenas += arenas
            if self._store is not None:
                self.memory.add(arenas)

    def replication(self) -> Any:
        """How often a value is kept."""
        config = ReplicateConfig()
        config.replica_num = self._place.replicas
        return config

    def close(self, deadline: Deadline) -> None:
        """Takes memory back from the engine and leaves it; what does not answer in time is left to itself."""
        with self._lock:
            store = self._store
            # A view of memory that is to be given back must not stay here.
            self._arenas.clear()
            if store is None:
                return
            self.memory.clear()
            self._store = None
        try:
            self._guard.call(store.close, deadline)
        except OSError:
            return

    def _require_master(self, deadline: Deadline) -> None:
        """The engine's own set-up waits for a master without end, and stops all threads of the process meanwhile."""
        host, _, port = self._place.master.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), deadline.left_s()).close()
        place = self._place
        command = [sys.executable, "-c", _PROBE, place.host, place.metadata, place.protocol, place.device, place.master]
        try:
            probe = subprocess.run(command, timeout=deadline.left_s(), capture_output=True, check=False)
        except subprocess.TimeoutExpired:
            raise TimeoutError("does not answer in time") from None
        if probe.returncode:
            raise ConnectionError(f"the store of {place.master} cannot be joined from here")

    def _connect(self) -> Any:
        place, store = self._place, MooncakeDistributedStore()
        code = store.setup(
            place.host,
            place.metadata,
            place.segment_bytes,
            _LOCAL_BUFFER_BYTES,
            place.protocol,
            place.device,
            place.master,
        )
        if code:
            raise ConnectionError(f"cannot join the store of {place.master} (code {code})")
        return store

    def _register(self, address: int, nbytes: int) -> None:
        code = self._store.register_buffer(address, nbytes)
        if code:
            raise StorageError(f"{nbytes} bytes of host memory cannot be registered with Mooncake (code {code})")

    def _unregister(self, address: int) -> None:
        self._store.unregister_buffer(address)
