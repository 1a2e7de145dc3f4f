"""A value is one string of a Valkey or Redis server: set whole, read whole, and the server decides what goes."""

from collections.abc import Iterator, Sequence

import numpy as np

from hicache.errors import StorageError
from hicache.storage.gate import Gate
from hicache.storage.names import namespace_prefix, value_name
from hicache.storage.protocol import Buffers, Cleared, ReadResult, StorageKey
from hicache.storage.remote import CALL_TIMEOUT_S, Deadline, Outage
from hicache.storage.valkey.nodes import Command, Node, Outcome, Unanswered
from hicache.storage.valkey.servers import Servers
from hicache.storage.valkey.wire import Filled, OtherSize, Refusal
from hicache.units import BoolArray


class ValkeyBackend:
    """A StorageBackend on a server or cluster, shared by all processes that use it.

    Each call ends within `timeout_s`; what was not answered by then is a failed page, an unanswered `contains` is a
    StorageError. `ttl_s`: how long the server keeps a value; None: as long as it likes. A server that can't be
    reached when this is opened, or later, is asked again by every call; one that refuses the login or has no such
    database raises StorageError here.
    """

    def __init__(
        self, servers: Servers, name: str, *, timeout_s: float = CALL_TIMEOUT_S, ttl_s: int | None = None
    ) -> None:
        self._servers = servers
        self._name = name
        self._timeout_s = timeout_s
        self._expiry = () if ttl_s is None else (b"EX", b"%d" % ttl_s)
        self._gate = Gate(name)
        self._outage = Outage(name)
        try:
            self._outage.note(servers.check(Deadline(timeout_s)))
        except StorageError as error:
            servers.close()
            raise StorageError(f"{name}: {error}") from error

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """Which pages are there now, shape [keys]. StorageError when the server does not say."""
        with self._gate:
            outcomes = self._run([Command((b"EXISTS", _name(key))) for key in keys])
            self._require(_first_failure(outcomes))
            return np.array([outcome == 1 for outcome in outcomes], dtype=np.bool_)

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """Values go from the socket into the buffers; one of another length is damaged, and removed."""
        result = ReadResult.nothing(len(keys))
        with self._gate:
            commands = [
                Command((b"GET", _name(key)), into=value, value_bytes=_nbytes(value))
                for key, value in zip(keys, values, strict=True)
            ]
            outcomes = self._run(commands)
            for i, outcome in enumerate(outcomes):
                result.ok[i] = isinstance(outcome, Filled)
                result.damaged[i] = isinstance(outcome, OtherSize) or _is_no_string(outcome)
                result.failed[i] = not result.damaged[i] and isinstance(outcome, Refusal | Unanswered)
            self._run([Command((b"UNLINK", _name(keys[i]))) for i, bad in enumerate(result.damaged) if bad])
        return result

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """Sets each value; False for those that the server refused, or did not acknowledge in time."""
        with self._gate:
            commands = [
                Command((b"SET", _name(key), value, *self._expiry), value_bytes=_nbytes(value))
                for key, value in zip(keys, values, strict=True)
            ]
            return np.array([outcome == b"OK" for outcome in self._run(commands)], dtype=np.bool_)

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """True: a value was there and is gone. Shape [keys]."""
        with self._gate:
            outcomes = self._run([Command((b"UNLINK", _name(key))) for key in keys])
            return np.array([outcome == 1 for outcome in outcomes], dtype=np.bool_)

    def clear(self, namespace: bytes) -> Cleared:
        """Deletes every value of a namespace; each step has the time of a call. StorageError when one is not answered.

        A server looks through all its keys for this: it stays usable, but it takes a while.
        """
        pages = size_bytes = 0
        pattern = f"{namespace_prefix(namespace)}*".encode()
        with self._gate:
            self._require(self._servers.check(Deadline(self._timeout_s)))
            for node in self._servers.nodes():
                for names in self._scan(node, pattern):
                    sizes = self._answered([Command((b"STRLEN", name)) for name in names])
                    gone = self._answered([Command((b"UNLINK", name)) for name in names])
                    pages += gone.count(1)
                    size_bytes += sum(size for size, yes in zip(sizes, gone, strict=True) if yes)
        return Cleared(pages, size_bytes)

    def health(self) -> tuple[str, ...]:
        """Says why the server did not do what the last call asked, if so."""
        return self._outage.health()

    def close(self) -> None:
        """Waits for calls under way, at most their timeout, and ends all connections."""
        if self._gate.close():
            self._servers.close()

    def _scan(self, node: Node, pattern: bytes) -> Iterator[list[bytes]]:
        cursor = b"0"
        while True:
            outcome = node.call(Deadline(self._timeout_s), b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")
            self._require(_first_failure([outcome]))
            match outcome:
                case [bytes(cursor), list(names)]:
                    yield [name for name in names if isinstance(name, bytes)]
                case _:
                    raise StorageError(f"{self._name}: {node.address} does not list its keys")
            if cursor == b"0":
                return

    def _answered(self, commands: Sequence[Command]) -> list[int]:
        outcomes = self._run(commands)
        self._require(_first_failure(outcomes))
        return [outcome if isinstance(outcome, int) else 0 for outcome in outcomes]

    def _require(self, failure: str | None) -> None:
        if failure is not None:
            raise StorageError(f"{self._name}: {failure}")

    def _run(self, commands: Sequence[Command]) -> list[Outcome]:
        if not commands:
            return []
        try:
            outcomes = self._servers.run(commands, Deadline(self._timeout_s))
        except StorageError as error:
            outcomes = [Unanswered(str(error))] * len(commands)
        self._outage.note(_first_failure(outcomes))
        return outcomes


def _name(key: StorageKey) -> bytes:
    return value_name(key).encode()


def _nbytes(value: Buffers) -> int:
    return sum(part.nbytes for part in value)


def _is_no_string(outcome: Outcome) -> bool:
    """Somebody else put another kind of thing under this name."""
    return isinstance(outcome, Refusal) and outcome.code == "WRONGTYPE"


def _first_failure(outcomes: Sequence[Outcome]) -> str | None:
    for outcome in outcomes:
        if isinstance(outcome, Unanswered):
            return outcome.reason
        if isinstance(outcome, Refusal) and not _is_no_string(outcome):
            hint = "; this is a cluster: add cluster=yes to the URL" if outcome.code == "MOVED" else ""
            return f"refused: {outcome.text}{hint}"
    return None
