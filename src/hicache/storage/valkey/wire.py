"""Commands are answered in their order on one connection, or the connection is broken and never used again.

The part of the RESP2 protocol that a page store needs. A value goes from host pages to the socket and back without a
copy in between; client libraries build a value as one `bytes` first, at more than twice the time.
"""

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hicache.storage.protocol import Buffers
from hicache.storage.remote import Deadline

_RECEIVE_BYTES = 1 << 16
_JOIN_BYTES = 1 << 12
"""Parts of a command up to this size are copied into one piece: a system call costs more."""
_LINE_BYTES = 1 << 16
_ANSWER_BYTES = 1 << 20
_MOST_NESTED = 8


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Login:
    """What a connection begins with. `user` and `password` may be empty: then none is sent."""

    user: str
    password: str
    database: int
    tls: ssl.SSLContext | None

    def __repr__(self) -> str:
        return f"Login(database={self.database}, tls={self.tls is not None})"


class LoginError(OSError):
    """The server knows no such user, password or database."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The server answered with an error."""

    text: str

    @property
    def code(self) -> str:
        """Its first word, such as MOVED."""
        return self.text.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Filled:
    """A value had as many bytes as the buffers, and they hold it now."""


@dataclass(frozen=True, slots=True)
class OtherSize:
    """A value had another number of bytes."""

    nbytes: int


Reply: TypeAlias = bytes | int | Refusal | Filled | OtherSize | list[object] | None


def pack(*arguments: bytes | Buffers) -> list[bytes | memoryview]:
    """A command as pieces to send; an argument may be a value in parts, which are not copied unless they are small."""
    pieces: list[bytes | memoryview] = []
    small = bytearray(b"*%d\r\n" % len(arguments))
    for argument in arguments:
        parts = [memoryview(argument)] if isinstance(argument, bytes) else [part.cast("B") for part in argument]
        small += b"$%d\r\n" % sum(part.nbytes for part in parts)
        for part in parts:
            if part.nbytes > _JOIN_BYTES:
                pieces += [bytes(small), part]
                small = bytearray()
            else:
                small += part
        small += b"\r\n"
    return [*pieces, bytes(small)]


class Connection:
    """One connection, logged in. OSError from any call means: it is broken. For one thread at a time."""

    def __init__(self, address: Address, login: Login, deadline: Deadline) -> None:
        self._socket = socket.create_connection((address.host, address.port), deadline.left_s())
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if login.tls is not None:
                self._socket = login.tls.wrap_socket(self._socket, server_hostname=address.host)
            self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
            self._start = self._stop = 0
            self._log_in(login, deadline)
        except BaseException:
            self._socket.close()
            raise

    def send(self, pieces: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        """Sends a packed command."""
        for piece in pieces:
            self._socket.settimeout(deadline.left_s())
            self._socket.sendall(piece)

    def receive(self, deadline: Deadline, into: Buffers | None = None) -> Reply:
        """The next answer; a value goes into the buffers, if there are any."""
        return self._receive(deadline, into, _MOST_NESTED)

    def call(self, deadline: Deadline, *arguments: bytes) -> Reply:
        """Sends one command and returns its answer."""
        self.send(pack(*arguments), deadline)
        return self.receive(deadline)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def _log_in(self, login: Login, deadline: Deadline) -> None:
        if login.password:
            names = [login.user.encode()] if login.user else []
            self._require(self.call(deadline, b"AUTH", *names, login.password.encode()), "log in", login.password)
        if login.database:
            self._require(self.call(deadline, b"SELECT", b"%d" % login.database), "select its database", "")

    @staticmethod
    def _require(reply: Reply, what: str, secret: str) -> None:
        if isinstance(reply, Refusal):
            text = reply.text.replace(secret, "***") if secret else reply.text
            raise LoginError(f"cannot {what}: {text}")

    def _receive(self, deadline: Deadline, into: Buffers | None, depth: int) -> Reply:
        line = self._line(deadline)
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text
        if kind == b"-":
            return Refusal(text.decode("utf-8", "replace"))
        number = _number(text)
        if kind == b":":
            return number
        if kind == b"$":
            return None if number < 0 else self._bulk(number, into, deadline)
        if kind == b"*" and depth:
            return None if number < 0 else [self._receive(deadline, into, depth - 1) for _ in range(number)]
        raise ConnectionError(f"not an answer of a Valkey or Redis server: {line[:40]!r}")

    def _bulk(self, nbytes: int, into: Buffers | None, deadline: Deadline) -> Reply:
        if into is None:
            if nbytes > _ANSWER_BYTES:
                raise ConnectionError(f"an answer of {nbytes} bytes where a short one was due")
            data = memoryview(bytearray(nbytes))
            self._fill(data, deadline)
            self._end(deadline)
            return bytes(data)
        if nbytes != sum(part.nbytes for part in into):
            self._skip(nbytes, deadline)
            self._end(deadline)
            return OtherSize(nbytes)
        for part in into:
            self._fill(part.cast("B"), deadline)
        self._end(deadline)
        return Filled()

    def _end(self, deadline: Deadline) -> None:
        mark = bytearray(2)
        self._fill(memoryview(mark), deadline)
        if mark != b"\r\n":
            raise ConnectionError("a value ended elsewhere than the server said")

    def _skip(self, nbytes: int, deadline: Deadline) -> None:
        scratch = memoryview(bytearray(min(nbytes, _RECEIVE_BYTES)))
        while nbytes:
            part = scratch[: min(nbytes, len(scratch))]
            self._fill(part, deadline)
            nbytes -= len(part)

    def _fill(self, target: memoryview, deadline: Deadline) -> None:
        while target:
            if self._start == self._stop and len(target) < _JOIN_BYTES:
                self._more(deadline)
            count = min(self._stop - self._start, len(target))
            if count:
                target[:count] = self._buffer[self._start : self._start + count]
                self._start += count
            else:
                self._socket.settimeout(deadline.left_s())
                count = _some(self._socket.recv_into(target))
            target = target[count:]

    def _line(self, deadline: Deadline) -> bytes:
        line = bytearray()
        while not line.endswith(b"\r\n"):
            if self._start == self._stop:
                self._more(deadline)
            ready = bytes(self._buffer[self._start : self._stop])
            cut = ready.find(b"\n") + 1 or len(ready)
            line += ready[:cut]
            self._start += cut
            if len(line) > _LINE_BYTES:
                raise ConnectionError("not an answer of a Valkey or Redis server: a line without end")
        return bytes(line[:-2])

    def _more(self, deadline: Deadline) -> None:
        self._start = self._stop = 0
        self._socket.settimeout(deadline.left_s())
        self._stop = _some(self._socket.recv_into(self._buffer))


def _some(count: int) -> int:
    if not count:
        raise ConnectionError("the server closed the connection")
    return count


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConnectionError(f"not an answer of a Valkey or Redis server: {text[:40]!r}") from None
