"""A value lies in memory that many processes pool; a master says where, and drops what is old when it is full."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hicache.errors import StorageError
from hicache.storage.codec import pool_digest
from hicache.storage.gate import Gate
from hicache.storage.mooncake.client import Client
from hicache.storage.names import namespace_prefix, value_name
from hicache.storage.protocol import Buffers, Cleared, ReadResult, StorageKey
from hicache.storage.remote import CALL_TIMEOUT_S, Deadline, Outage
from hicache.units import BoolArray

T = TypeVar("T")

_ABSENT = -704
_FULL = -200
_THERE = 1
_TRIES = 2
"""A client learns only by asking that the master was started anew, and finds it at the next try."""


class MooncakeBackend:
    """A StorageBackend on a Mooncake Store, shared by all processes that use it.

    Values move between registered host memory (`register`) and the store without a copy; other memory is copied
    through a registered block. Before memory is lent the master has to answer within `timeout_s`; from then on the
    engine's own limits hold, for what it may still write to cannot be taken away from it. An unanswered `contains` is
    a StorageError.
    """

    def __init__(self, client: Client, name: str, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._client = client
        self._name = name
        self._timeout_s = timeout_s
        self._gate = Gate(name)
        self._outage = Outage(name)
        self._lock = threading.Lock()
        self._sizes: dict[tuple[bytes, str], int] = {}
        try:
            client.connected(Deadline(timeout_s))
        except OSError as error:
            self._outage.note(str(error))

    def register(self, arenas: Sequence[memoryview]) -> None:
        """Tells the engine of host memory whose pages will be stored and fetched. StorageError if it can't be."""
        with self._gate:
            self._client.add_arenas(arenas)

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """Which pages are there now, shape [keys]. StorageError when the master does not say."""
        with self._gate:
            there = self._there(keys, Deadline(self._timeout_s))
            if there is None:
                raise StorageError("; ".join(self._outage.health()))
            return there

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """Fills the buffers; a value of another length is damaged, and removed."""
        result = ReadResult.nothing(len(keys))
        with self._gate:
            deadline = Deadline(self._timeout_s)
            there = self._there(keys, deadline)
            if there is None:
                result.failed[:] = True
                return result
            asked = [i for i, yes in enumerate(there) if yes]
            self._fetch(asked, keys, values, result, deadline)
        return result

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """Puts each value; False when the store is full or does not answer. A value that is replaced is copied."""
        stored = np.zeros(len(keys), dtype=np.bool_)
        with self._gate:
            deadline = Deadline(self._timeout_s)
            there = self._there(keys, deadline)
            if there is None:
                return stored
            new = [i for i, yes in enumerate(there) if not yes]
            self._put(new, keys, values, stored)
            for i in (i for i, yes in enumerate(there) if yes):
                stored[i] = self._replace(value_name(keys[i]), b"".join(values[i]), deadline)
            self._learn(stored, keys, values)
        return stored

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """True: a value was there and is gone. Shape [keys]."""
        with self._gate:
            gone = np.zeros(len(keys), dtype=np.bool_)
            if keys:
                names = [value_name(key) for key in keys]
                codes = self._ask(Deadline(self._timeout_s), lambda store: store.batch_remove(names, True))
                gone[:] = False if codes is None else np.array(codes) == 0
            return gone

    def clear(self, namespace: bytes) -> Cleared:
        """Deletes every value of a namespace. The engine tells how many went, not how large they were.

        Bytes are those of pools that this process stored pages of or fetched: a pool's pages have one size.
        """
        with self._gate:
            with self._lock:
                known = [(pool, size) for (space, pool), size in self._sizes.items() if space == namespace]
            prefix = namespace_prefix(namespace)
            pages = size_bytes = 0
            for pool, size in known:
                count = self._remove_all(f"{prefix}{pool_digest(pool).hex()}/")
                pages, size_bytes = pages + count, size_bytes + count * size
            return Cleared(pages + self._remove_all(prefix), size_bytes)

    def health(self) -> tuple[str, ...]:
        """Says why the store did not do what the last call asked, if so."""
        return self._outage.health()

    def close(self) -> None:
        """Waits for calls under way, takes memory back and leaves the store."""
        if self._gate.close():
            self._client.close(Deadline(self._timeout_s))

    def _there(self, keys: Sequence[StorageKey], deadline: Deadline) -> BoolArray | None:
        if not keys:
            return np.zeros(0, dtype=np.bool_)
        names = [value_name(key) for key in keys]
        codes: list[int] | None = None
        for _ in range(_TRIES):
            codes = self._ask(deadline, lambda store: store.batch_is_exist(names))
            if codes is None or min(codes) >= 0:
                break
        if codes is None:
            return None
        if min(codes) < 0:
            self._outage.note(f"the master does not say what is there (code {min(codes)})")
            return None
        return np.array([code == _THERE for code in codes], dtype=np.bool_)

    def _fetch(
        self,
        asked: Sequence[int],
        keys: Sequence[StorageKey],
        values: Sequence[Buffers],
        result: ReadResult,
        deadline: Deadline,
    ) -> None:
        if not asked:
            return
        store = self._client.connected(deadline)
        names = [value_name(keys[i]) for i in asked]
        with self._client.memory.lend([values[i] for i in asked]) as lent:
            codes = store.batch_get_into_multi_buffers(
                names, [one.addresses for one in lent], [one.sizes for one in lent]
            )
            for i, one, code in zip(asked, lent, codes, strict=True):
                result.ok[i] = code == one.nbytes
                if result.ok[i]:
                    one.hand_out()
        for i, name, code in zip(asked, names, codes, strict=True):
            if not result.ok[i] and code != _ABSENT:
                self._judge(i, name, sum(part.nbytes for part in values[i]), result, deadline)
        self._learn(result.ok, keys, values)

    def _judge(self, i: int, name: str, nbytes: int, result: ReadResult, deadline: Deadline) -> None:
        """A value could not be read: because it has another size, or because its holder does not answer."""
        size = self._ask(deadline, lambda store: store.get_size(name))
        if size is not None and size >= 0 and size != nbytes:
            result.damaged[i] = True
            self._ask(deadline, lambda store: store.remove(name, True))
        elif size != _ABSENT:
            result.failed[i] = True
            self._outage.note("the process that holds a value does not answer")

    def _put(
        self, new: Sequence[int], keys: Sequence[StorageKey], values: Sequence[Buffers], stored: BoolArray
    ) -> None:
        if not new:
            return
        store = self._client.connected(Deadline(self._timeout_s))
        names = [value_name(keys[i]) for i in new]
        with self._client.memory.lend([values[i] for i in new]) as lent:
            for one in lent:
                one.take_in()
            codes = store.batch_put_from_multi_buffers(
                names, [one.addresses for one in lent], [one.sizes for one in lent], self._client.replication()
            )
        stored[new] = np.array(codes) == 0
        bad = next((code for code in codes if code), 0)
        if bad:
            self._outage.note("the store is full" if bad == _FULL else f"a value could not be stored (code {bad})")

    def _replace(self, name: str, content: bytes, deadline: Deadline) -> bool:
        return self._ask(deadline, lambda store: store.upsert(name, content, self._client.replication())) == 0

    def _remove_all(self, prefix: str) -> int:
        count: int | None = self._ask(
            Deadline(self._timeout_s), lambda store: store.remove_by_regex(f"^{prefix}", True)
        )
        if count is None or count < 0:
            raise StorageError("; ".join(self._outage.health()) or f"{self._name}: cannot clear (code {count})")
        return count

    def _learn(self, good: BoolArray, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> None:
        with self._lock:
            for key, value, yes in zip(keys, values, good, strict=True):
                if yes:
                    self._sizes[key.namespace, key.pool] = sum(part.nbytes for part in value)

    def _ask(self, deadline: Deadline, call: Callable[[Any], T]) -> T | None:
        try:
            answer = self._client.call(deadline, call)
        except OSError as error:
            self._outage.note(str(error))
            return None
        self._outage.note(None)
        return answer
