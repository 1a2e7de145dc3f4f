"""A page is reported usable only after its header and checksum were checked; everything else is a counted miss."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hicache.storage.breaker import Breaker, BreakerOptions, BreakerStats
from hicache.storage.codec import HEADER_BYTES, Verdict, check, encode_header
from hicache.storage.gate import Gate
from hicache.storage.guarded import guarded
from hicache.storage.listing import ListsValues
from hicache.storage.protocol import Cleared, EachPageBackend, ReadResult, RegistersMemory, StorageBackend, StorageKey
from hicache.units import BoolArray

MOST_LABELS = 1000
"""How many namespaces are described, those that were used last."""


@dataclass(frozen=True, slots=True)
class PageStoreStats:
    """What really happened since the store was opened. Bytes are payload bytes of whole pages that arrived or went out.

    `read_pages + missed_pages + damaged_pages + read_failed_pages` is the number of pages asked for, and
    `written_pages + skipped_pages + write_failed_pages` the number given.
    """

    read_pages: int = 0
    read_bytes: int = 0
    missed_pages: int = 0
    damaged_pages: int = 0
    """Found, but truncated, foreign, or with bits flipped: dropped, and written again when it comes by."""
    read_failed_pages: int = 0
    written_pages: int = 0
    written_bytes: int = 0
    skipped_pages: int = 0
    """Not written because a good page was there."""
    write_failed_pages: int = 0
    """Refused, or the backend failed."""
    reading: BreakerStats = field(default_factory=BreakerStats)
    writing: BreakerStats = field(default_factory=BreakerStats)
    """Whether a store that keeps failing is left alone for a while."""


class PageStore:
    """Stores and fetches whole pages on any backend. Blocking and thread-safe; for workers.

    Pages are given as memoryviews of host memory (any item format, contiguous): bytes go between them and the backend
    without a copy. They must not change during the call. With `breaker`, a backend that keeps failing or does not come
    back is left alone for a while: calls are then answered at once.
    """

    def __init__(self, backend: StorageBackend, breaker: BreakerOptions | None = None) -> None:
        self._guard = None if breaker is None else guarded(backend, Breaker(breaker), Breaker(breaker))
        self._backend = backend if self._guard is None else self._guard
        self._stats = PageStoreStats()
        self._lock = threading.Lock()
        self._gate = Gate("page store")
        self._labels: dict[bytes, str] = {}
        self._labelled = backend if isinstance(backend, ListsValues) else None

    @property
    def backend(self) -> StorageBackend:
        """What lies below."""
        return self._backend if self._guard is None else self._guard.inner

    @property
    def refuses_reads(self) -> bool:
        """Whether reading is paused: nothing is found, and nothing arrives. Never blocks."""
        return self._guard is not None and self._guard.reading.refuses

    @property
    def refuses_writes(self) -> bool:
        """Whether writing is paused. Never blocks."""
        return self._guard is not None and self._guard.writing.refuses

    def register(self, arenas: Sequence[memoryview]) -> None:
        """Tells a backend that wants to know it in which host memory pages will lie, until the store is closed."""
        if isinstance(self._backend, RegistersMemory):
            self._backend.register(arenas)

    def describe(self, namespace: bytes, text: str) -> None:
        """What a namespace (a fingerprint, 32 bytes) is: kept along with its pages by stores that can list them.

        Never blocks, so the owner thread may call it: it is stored when pages of the namespace are.
        """
        with self._lock:
            self._labels.pop(namespace, None)
            self._labels[namespace] = text
            if len(self._labels) > MOST_LABELS:
                del self._labels[next(iter(self._labels))]

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """Which pages are there and not known to be damaged; bool, shape [keys]. Their bytes are checked by `read`."""
        with self._gate:
            return self._backend.contains(keys)

    def read(self, keys: Sequence[StorageKey], pages: Sequence[memoryview]) -> ReadResult:
        """Fills `pages`; only those marked ok may be used, the bytes of all others are undefined.

        A damaged page is dropped from the backend, so that neither `contains` nor `write` takes it for a good one.
        """
        with self._gate:
            payloads = [page.cast("B") for page in pages]
            headers = memoryview(bytearray(HEADER_BYTES * len(keys)))
            heads = [headers[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(len(keys))]
            values = list(zip(heads, payloads, strict=True))

            def is_good(i: int) -> bool:
                return check(keys[i], heads[i], payloads[i]) is Verdict.GOOD

            if isinstance(self._backend, EachPageBackend):
                result = self._backend.read_each(keys, values, is_good)
            else:
                result = self._backend.read(keys, values)
                self._reject(keys, result, [i for i in _marked(result.ok) if not is_good(i)])
            self._count_read(result, payloads)
            return result

    def write(self, keys: Sequence[StorageKey], pages: Sequence[memoryview]) -> BoolArray:
        """Stores pages, a chain's root first; True: the page is there, whole. Shape [keys].

        Pages that are there already are not written again.
        """
        with self._gate:
            stored = self._backend.contains(keys)
            skipped = int(stored.sum())
            todo = _marked(~stored)
            todo_keys = [keys[i] for i in todo]
            payloads = [pages[i].cast("B") for i in todo]
            written = self._write(todo_keys, payloads)
            stored[todo] = written
            if written.any():
                self._label({key.namespace for key in todo_keys})
            self._count_written(skipped, [payloads[i].nbytes for i in _marked(written)], len(todo))
            return stored

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """True: a page was there and is gone. Shape [keys]."""
        with self._gate:
            return self._backend.delete(keys)

    def clear(self, namespace: bytes) -> Cleared:
        """Deletes every page of a namespace (a fingerprint, 32 bytes). Bytes are those of values, headers included."""
        with self._gate:
            return self._backend.clear(namespace)

    def stats(self) -> PageStoreStats:
        """A snapshot of the counters."""
        with self._lock:
            stats = self._stats
        if self._guard is None:
            return stats
        return replace(stats, reading=self._guard.reading.stats(), writing=self._guard.writing.stats())

    def health(self) -> tuple[str, ...]:
        """One sentence for each thing that is wrong with the backend now; empty when all is well."""
        return self._backend.health()

    def close(self) -> None:
        """Waits for calls under way and closes the backend. Later calls raise ClosedError."""
        if self._gate.close():
            self._backend.close()

    def _write(self, keys: Sequence[StorageKey], payloads: Sequence[memoryview]) -> BoolArray:
        heads = [memoryview(bytearray(HEADER_BYTES)) for _ in keys]
        values = list(zip(heads, payloads, strict=True))

        def fill(i: int) -> None:
            heads[i][:] = encode_header(keys[i], payloads[i])

        if isinstance(self._backend, EachPageBackend):
            return self._backend.write_each(keys, values, fill)
        for i in range(len(keys)):
            fill(i)
        return self._backend.write(keys, values)

    def _label(self, namespaces: Iterable[bytes]) -> None:
        if self._labelled is None:
            return
        for namespace in namespaces:
            with self._lock:
                text = self._labels.get(namespace)
            if text is not None:
                self._labelled.describe(namespace, text)

    def _reject(self, keys: Sequence[StorageKey], result: ReadResult, rejected: Sequence[int]) -> None:
        if rejected:
            self._backend.delete([keys[i] for i in rejected])
            result.ok[rejected] = False
            result.damaged[rejected] = True

    def _count_read(self, result: ReadResult, payloads: Sequence[memoryview]) -> None:
        ok, damaged, failed = int(result.ok.sum()), int(result.damaged.sum()), int(result.failed.sum())
        ok_bytes = sum(payloads[i].nbytes for i in _marked(result.ok))
        with self._lock:
            before = self._stats
            self._stats = replace(
                before,
                read_pages=before.read_pages + ok,
                read_bytes=before.read_bytes + ok_bytes,
                missed_pages=before.missed_pages + len(payloads) - ok - damaged - failed,
                damaged_pages=before.damaged_pages + damaged,
                read_failed_pages=before.read_failed_pages + failed,
            )

    def _count_written(self, skipped: int, written_bytes: Sequence[int], tried: int) -> None:
        with self._lock:
            before = self._stats
            self._stats = replace(
                before,
                written_pages=before.written_pages + len(written_bytes),
                written_bytes=before.written_bytes + sum(written_bytes),
                skipped_pages=before.skipped_pages + skipped,
                write_failed_pages=before.write_failed_pages + tried - len(written_bytes),
            )


def _marked(bitmap: BoolArray) -> list[int]:
    return [int(i) for i in np.flatnonzero(bitmap)]
