"""A value is one object: put whole, read whole by a range, and nothing tells two writers of one page apart."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import obstore
from obstore.exceptions import GenericError
from obstore.store import S3Store

from hicache.errors import StorageError
from hicache.storage.gate import Gate
from hicache.storage.names import ROOT, namespace_prefix, value_name
from hicache.storage.protocol import Buffers, Cleared, ReadResult, StorageKey
from hicache.storage.remote import CALL_TIMEOUT_S, Deadline, Outage
from hicache.storage.s3.requests import (
    ABSENT,
    REFUSALS,
    REQUEST_ERRORS,
    Answered,
    Failed,
    Outcome,
    Requests,
    explain,
    has_status,
)
from hicache.storage.s3.requests import failures as first_failure
from hicache.units import BoolArray

T = TypeVar("T")

CONNECTIONS = 8


class S3Backend:
    """A StorageBackend in a bucket, shared by all processes that use it.

    Each call ends within `timeout_s`; what was not answered by then is a failed page, an unanswered `contains` is a
    StorageError. Opening it raises StorageError when there is no such bucket or the credentials have no right to it;
    a server that can't be reached is asked again by every call. Nothing is ever evicted here: give the bucket a
    lifecycle rule.
    """

    def __init__(
        self, store: S3Store, name: str, *, timeout_s: float = CALL_TIMEOUT_S, connections: int = CONNECTIONS
    ) -> None:
        self._store = store
        self._name = name
        self._timeout_s = timeout_s
        self._gate = Gate(name)
        self._outage = Outage(name)
        self._requests = Requests(connections)
        try:
            self._check()
        except StorageError:
            self._requests.close()
            raise

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """Which pages are there now, shape [keys]: one HEAD request each. StorageError when one is not answered."""
        with self._gate:
            outcomes = self._all(len(keys), lambda i: self._head(value_name(keys[i])))
            if reason := first_failure(outcomes):
                raise StorageError(f"{self._name}: {reason}")
            return _there(outcomes)

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """Asks for as many bytes as the buffers have; an object of another size is damaged, and deleted."""
        result = ReadResult.nothing(len(keys))
        with self._gate:
            deadline = Deadline(self._timeout_s)
            sizes = [sum(part.nbytes for part in value) for value in values]
            reasons = []
            for i, outcome in self._requests.run(len(keys), lambda i: self._get(keys[i], sizes[i]), deadline):
                if isinstance(outcome, Failed):
                    result.failed[i] = True
                    reasons.append(outcome.reason)
                elif outcome.value is not None:
                    result.ok[i] = outcome.value.nbytes == sizes[i]
                    result.damaged[i] = not result.ok[i]
                    if result.ok[i]:
                        _scatter(outcome.value, values[i])
            self._outage.note(reasons[0] if reasons else None)
            self._delete([value_name(key) for key, bad in zip(keys, result.damaged, strict=True) if bad])
        return result

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """Puts each value as an object; False for those that were refused or not acknowledged in time."""
        with self._gate:
            outcomes = self._all(len(keys), lambda i: self._put(keys[i], values[i]))
            return _there(outcomes)

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """True: a value was there and is gone. Shape [keys]. Two that delete one page at a time may both say so."""
        with self._gate:
            names = [value_name(key) for key in keys]
            unique = list(dict.fromkeys(names))
            gone = dict(zip(unique, self._delete(unique).tolist(), strict=True))
            return np.array([gone.pop(name, False) for name in names], dtype=np.bool_)

    def clear(self, namespace: bytes) -> Cleared:
        """Deletes every object of a namespace. StorageError when the server does not list them."""
        pages = size_bytes = left = 0
        with self._gate:
            try:
                for found in obstore.list(self._store, namespace_prefix(namespace).rstrip("/"), chunk_size=1000):
                    gone = self._delete([item["path"] for item in found])
                    pages += int(gone.sum())
                    left += int((~gone).sum())
                    size_bytes += sum(item["size"] for item, yes in zip(found, gone, strict=True) if yes)
            except REQUEST_ERRORS as error:
                raise StorageError(f"{self._name}: {explain(error)}") from error
        return Cleared(pages, size_bytes, left)

    def health(self) -> tuple[str, ...]:
        """Says why the server did not do what the last call asked, if so."""
        return self._outage.health()

    def close(self) -> None:
        """Waits for calls under way, at most their timeout."""
        if self._gate.close():
            self._requests.close()

    def _check(self) -> None:
        try:
            next(iter(obstore.list(self._store, ROOT, chunk_size=1)), None)
        except REQUEST_ERRORS as error:
            if isinstance(error, REFUSALS) or has_status(error, 401) or has_status(error, 403):
                raise StorageError(f"{self._name}: {explain(error)}") from error
            if isinstance(error, ABSENT) or has_status(error, 404):
                raise StorageError(f"{self._name}: there is no such bucket; create it first") from error
            self._outage.note(explain(error))

    def _all(self, count: int, prepare: Callable[[int], Callable[[], T]]) -> list[Outcome[T]]:
        outcomes: list[Outcome[T]] = [Answered(None)] * count
        for i, outcome in self._requests.run(count, prepare, Deadline(self._timeout_s)):
            outcomes[i] = outcome
        if count:
            self._outage.note(first_failure(outcomes))
        return outcomes

    def _delete(self, names: Sequence[str]) -> BoolArray:
        return _there(self._all(len(names), lambda i: self._remove(names[i])))

    def _head(self, name: str) -> Callable[[], bool]:
        def request() -> bool:
            obstore.head(self._store, name)
            return True

        return request

    def _remove(self, name: str) -> Callable[[], bool]:
        head = self._head(name)

        def request() -> bool:
            head()
            obstore.delete(self._store, name)
            return True

        return request

    def _get(self, key: StorageKey, size_bytes: int) -> Callable[[], memoryview]:
        name = value_name(key)

        def request() -> memoryview:
            try:
                found = obstore.get(self._store, name, options={"range": (0, max(size_bytes, 1))})
            except GenericError as error:
                if has_status(error, 416):
                    return memoryview(b"")
                raise
            if found.meta["size"] > size_bytes:
                return memoryview(bytes(size_bytes + 1))
            return memoryview(found.bytes())

        return request

    def _put(self, key: StorageKey, value: Buffers) -> Callable[[], bool]:
        # Bytes of its own: the request may outlive this call, and the host pages are somebody else's then.
        name, content = value_name(key), b"".join(value)

        def request() -> bool:
            obstore.put(self._store, name, content, mode="overwrite", use_multipart=False)
            return True

        return request


def _there(outcomes: Sequence[Outcome[bool]]) -> BoolArray:
    return np.array([isinstance(outcome, Answered) and bool(outcome.value) for outcome in outcomes], dtype=np.bool_)


def _scatter(value: memoryview, buffers: Buffers) -> None:
    for part in buffers:
        part.cast("B")[:] = value[: part.nbytes]
        value = value[part.nbytes :]
