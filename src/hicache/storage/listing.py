"""A store that can say what it holds is looked at, checked and cleaned up without knowing any prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hicache.errors import ConfigError
from hicache.storage.chains import NAMESPACE_ID_BYTES, PAGE_ID_BYTES, POOL_ID_BYTES, EntryId
from hicache.storage.protocol import Cleared, ReadResult, StorageBackend


@dataclass(frozen=True, slots=True)
class StoredValue:
    """One value of a store. `used_ns`: when its page was last used, in nanoseconds of the store's own clock."""

    entry: EntryId
    size_bytes: int
    used_ns: int
    private: bool = False
    """Only who wrote it will read it, and that process is alive."""

    @property
    def page(self) -> bytes:
        """Id of the page within its chain."""
        return self.entry[:PAGE_ID_BYTES]

    @property
    def parent(self) -> bytes:
        """Id of the page before it."""
        return self.entry[PAGE_ID_BYTES : 2 * PAGE_ID_BYTES]

    @property
    def pool(self) -> bytes:
        """Id of its pool."""
        return self.entry[2 * PAGE_ID_BYTES : 2 * PAGE_ID_BYTES + POOL_ID_BYTES]

    @property
    def namespace(self) -> bytes:
        """Id of its namespace (`chains.namespace_id`)."""
        return self.entry[-NAMESPACE_ID_BYTES:]


@runtime_checkable
class ListsValues(StorageBackend, Protocol):
    """A backend that knows what it holds: optional. Blocking and thread-safe; others may go on using the store."""

    def values(self) -> Sequence[StoredValue]:
        """Everything that is stored now."""

    def look(self, values: Sequence[StoredValue], buffers: Sequence[memoryview]) -> ReadResult:
        """Fills a buffer of `size_bytes` per value, as `read` does; nothing counts as used, and nothing is dropped."""

    def remove(self, values: Sequence[StoredValue]) -> Cleared:
        """Takes values away; those that are gone already are not counted."""

    def reclaim(self) -> int:
        """Frees what processes that are gone left behind: unfinished and private values; returns how many."""

    def trim(self, size_bytes: int) -> Cleared:
        """Drops tails of the chains that rested longest, until the store takes at most so many bytes."""

    def taken_bytes(self) -> int:
        """Bytes that the store takes where it lies, free room in it included."""

    def describe(self, namespace: bytes, text: str) -> None:
        """Keeps a text about a namespace (fingerprint, 32 bytes), for people and tools; cheap if it is there.

        It goes with `clear`. If it can't be kept, it is not there; nothing else depends on it.
        """

    def descriptions(self) -> Mapping[bytes, str]:
        """The texts that are kept, by the namespace's fingerprint."""


def require_listing(scheme: str, backend: StorageBackend) -> ListsValues:
    """The backend, if it can list; else ConfigError that names it."""
    if isinstance(backend, ListsValues):
        return backend
    raise ConfigError(f"{scheme}: stores can't list what they hold; use the tools of that engine instead")
