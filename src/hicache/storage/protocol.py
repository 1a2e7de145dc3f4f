"""What a storage backend must do: a value is there whole, or it is not there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from hicache.errors import InvariantError
from hicache.keys import KEY_BYTES
from hicache.units import BoolArray, PoolName


@dataclass(frozen=True, slots=True)
class StorageKey:
    """Names one page of one pool. `namespace`, `page` and `parent` are 32 bytes each.

    `parent` is the key of the page before this one, for a prefix's first page the namespace fingerprint. It is a
    function of `page`, so it tells no two pages apart; it lets a store that is full drop tails before their heads.
    """

    namespace: bytes
    pool: PoolName
    page: bytes
    parent: bytes
    private: bool = field(default=False, compare=False)
    """Only who wrote the page will ever read it: a store may drop it once its writer is gone. No part of its name."""

    def __post_init__(self) -> None:
        if not len(self.namespace) == len(self.page) == len(self.parent) == KEY_BYTES:
            raise InvariantError(f"namespace, page and parent of a storage key are {KEY_BYTES} bytes each: {self}")
        if self.page == self.parent:
            raise InvariantError(f"a page cannot be its own parent: {self}")


def chain_keys(
    namespace: bytes, pool: PoolName, parent: bytes, keys: bytes, *, private: bool = False
) -> list[StorageKey]:
    """One StorageKey per page of a run: `keys` as `page_keys` gives them (32 bytes per page), `parent` before them."""
    pages = [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
    parents = [parent, *pages[:-1]]
    return [StorageKey(namespace, pool, page, before, private) for page, before in zip(pages, parents, strict=False)]


Buffers: TypeAlias = Sequence[memoryview]
"""The parts of one value, in order: bytes move between them and the store without a copy in between."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What became of each page asked for; bool, shape [pages] each. A page that is none of the three was not there."""

    ok: BoolArray
    """The value had exactly as many bytes as the buffers, and all of them arrived."""
    damaged: BoolArray
    """There was a value, but not the right one (another length; for PageStore also: foreign, bits flipped)."""
    failed: BoolArray
    """The store could not answer (I/O error, unreachable, closed by a breaker)."""

    @classmethod
    def nothing(cls, pages: int) -> "ReadResult":
        """Three fresh bitmaps, all False: every page missed until it is marked."""
        return cls(*(np.zeros(pages, dtype=np.bool_) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was taken away: pages (one in each pool that had it), and their bytes as they were kept.

    `left_pages` were to go as well and could not be removed.
    """

    pages: int = 0
    size_bytes: int = 0
    left_pages: int = 0

    def __add__(self, other: "Cleared") -> "Cleared":
        """Both together."""
        return Cleared(self.pages + other.pages, self.size_bytes + other.size_bytes, self.left_pages + other.left_pages)


class StorageBackend(Protocol):
    """Blocking and thread-safe: workers call it, the owner thread never does. Calls are batched, answers per page.

    A page that can't be read, written or found is an answer, not an exception; StorageError is for a store that is gone
    as a whole. Values are opaque bytes: PageStore adds the header that says whose they are and whether they are intact.
    """

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """Which pages are there now, shape [keys]. A value known to be damaged is not. Reads no values."""

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """Fills each value's buffers. What lies in the buffers of a page that is not ok is undefined.

        A value found damaged is not reported by `contains` from then on, until it is written again.
        """

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """Puts each value under its key, in place of any older one; True: it is there, whole. Shape [keys].

        On False the older value or none is there, never a part of a value; where only the
        answer was lost, the new one. Callers write a chain root first.
        """

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """True: a value was there and is gone. Shape [keys]."""

    def clear(self, namespace: bytes) -> Cleared:
        """Deletes every value of a namespace (a fingerprint, 32 bytes), whoever wrote it, and nothing else.

        What is written meanwhile may stay.
        """

    def health(self) -> tuple[str, ...]:
        """One sentence for each thing that is wrong now; empty when all is well."""

    def close(self) -> None:
        """Gives back what the backend holds; stored values stay. Later calls raise ClosedError."""


@runtime_checkable
class RegistersMemory(Protocol):
    """A backend that moves pages without a copy only from and into memory that it was told of before."""

    def register(self, arenas: Sequence[memoryview]) -> None:
        """Host memory in which pages will lie, until `close`; more may follow. StorageError if it is not accepted."""


@runtime_checkable
class EachPageBackend(StorageBackend, Protocol):
    """A backend that may also be called so that each page passes the CPU once: optional, for local stores.

    `index` is a page's place in the batch. Both calls promise what `read` and `write` do.
    """

    def read_each(
        self, keys: Sequence[StorageKey], values: Sequence[Buffers], is_good: Callable[[int], bool]
    ) -> ReadResult:
        """As `read`; asks `is_good(index)` as soon as a value has arrived, and if not, it is damaged."""

    def write_each(
        self, keys: Sequence[StorageKey], values: Sequence[Buffers], fill: Callable[[int], None]
    ) -> BoolArray:
        """As `write`; calls `fill(index)` before a value's bytes are used, which may change all but their number."""
