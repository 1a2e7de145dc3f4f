"""Every command that is asked gets an outcome: what the server answered, or why it did not within the time."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hicache.storage.protocol import Buffers
from hicache.storage.remote import Deadline
from hicache.storage.valkey.wire import Address, Connection, Login, LoginError, Reply, pack

_WINDOW_BYTES = 8 << 20
"""Values that may be on their way at a time: a server keeps what it is asked for in memory until it is taken."""
_WINDOW_SMALL = 512
_IDLE_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class Command:
    """One command about one key. `into`: where its value goes; `value_bytes`: what it moves, in either direction."""

    arguments: tuple[bytes | Buffers, ...]
    into: Buffers | None = None
    value_bytes: int = 0

    @property
    def key(self) -> bytes:
        """The key that decides which node of a cluster is asked."""
        key = self.arguments[1]
        assert isinstance(key, bytes)
        return key


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No answer came, for this reason. `for_good`: trying again will not help, the settings are wrong."""

    reason: str
    for_good: bool = False


Outcome: TypeAlias = Reply | Unanswered


class Node:
    """One server, its connections kept for later calls. Thread-safe: a connection is used by one call at a time."""

    def __init__(self, address: Address, login: Login) -> None:
        self.address = address
        self._login = login
        self._lock = threading.Lock()
        self._idle: list[Connection] = []

    def run(self, commands: Sequence[Command], deadline: Deadline, *, asking: bool = False) -> list[Outcome]:
        """One outcome per command, in order. Commands left without answer by an old connection are sent once more."""
        outcomes: list[Outcome] = []
        try:
            connection = self._take()
            if connection is not None:
                try:
                    return self._converse(connection, commands, deadline, outcomes, asking)
                except TimeoutError:
                    raise
                except OSError:
                    # The server may have been started anew since: that connection could not know.
                    self._drop_idle()
            rest = commands[len(outcomes) :]
            self._converse(Connection(self.address, self._login, deadline), rest, deadline, outcomes, asking)
        except OSError as error:
            reason = Unanswered(f"{self.address}: {_say(error)}", isinstance(error, LoginError))
            outcomes += [reason] * (len(commands) - len(outcomes))
        return outcomes

    def call(self, deadline: Deadline, *arguments: bytes) -> Outcome:
        """The outcome of a command that moves no value."""
        return self.run([Command(arguments)], deadline)[0]

    def close(self) -> None:
        """Ends all connections that are not in use."""
        self._drop_idle()

    def _converse(
        self,
        connection: Connection,
        commands: Sequence[Command],
        deadline: Deadline,
        outcomes: list[Outcome],
        asking: bool,
    ) -> list[Outcome]:
        try:
            _converse(connection, commands, deadline, outcomes, asking)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(connection)
                return outcomes
        connection.close()
        return outcomes

    def _take(self) -> Connection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _converse(
    connection: Connection, commands: Sequence[Command], deadline: Deadline, outcomes: list[Outcome], asking: bool
) -> None:
    """Sends ahead of the answers, as far as the window allows."""
    sent = moving_bytes = 0
    for i, command in enumerate(commands):
        while sent < len(commands) and _fits(commands[sent], sent - i, moving_bytes):
            if asking:
                connection.send(pack(b"ASKING"), deadline)
            connection.send(pack(*commands[sent].arguments), deadline)
            moving_bytes += commands[sent].value_bytes
            sent += 1
        if asking:
            connection.receive(deadline)
        outcomes.append(connection.receive(deadline, command.into))
        moving_bytes -= command.value_bytes


def _fits(command: Command, ahead: int, moving_bytes: int) -> bool:
    return ahead == 0 or (ahead < _WINDOW_SMALL and moving_bytes + command.value_bytes <= _WINDOW_BYTES)


def _say(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "does not answer in time"
    return error.strerror or str(error)
