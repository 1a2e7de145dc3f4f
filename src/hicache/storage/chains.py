"""Which entries a bounded store holds: the oldest chain goes first, and of a chain its tail before its head."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TypeAlias, TypeVar

from hicache.storage.protocol import StorageKey
from hicache.units import PoolName

EntryId: TypeAlias = bytes
"""Names a value in a store: page id (16 bytes), parent's page id (16), pool id (8), namespace id (8).

Digests, nothing a user chose.
"""

PageId: TypeAlias = bytes

_Item = TypeVar("_Item")

PAGE_ID_BYTES = 16
POOL_ID_BYTES = 8
NAMESPACE_ID_BYTES = 8
ENTRY_ID_BYTES = 2 * PAGE_ID_BYTES + POOL_ID_BYTES + NAMESPACE_ID_BYTES

FORMAT_VERSION = 1
"""Version of the bytes of a value. It is part of every entry id: two versions never read each other's values."""

_MOST_REFUSED = 100_000

_PERSON = b"hicache page %d" % FORMAT_VERSION


def entry_id(key: StorageKey) -> EntryId:
    """The id under which a store keeps this key's value; 48 bytes. Stable over processes and machines."""
    pages = page_id(key.namespace, key.page) + page_id(key.namespace, key.parent)
    return pages + pool_id(key.pool) + namespace_id(key.namespace)


@lru_cache(maxsize=1 << 10)
def namespace_id(namespace: bytes) -> bytes:
    """The last 8 bytes of the ids of all entries of a namespace."""
    return blake2b(namespace, digest_size=NAMESPACE_ID_BYTES, person=_PERSON).digest()


@lru_cache(maxsize=1 << 14)
def page_id(namespace: bytes, page: bytes) -> PageId:
    """The id of a page within all ids; that of the namespace itself comes before a first page."""
    return blake2b(namespace + page, digest_size=PAGE_ID_BYTES, person=_PERSON).digest()


@lru_cache(maxsize=64)
def pool_id(pool: PoolName) -> bytes:
    """The id of a pool within all ids."""
    return blake2b(pool.encode("utf-8", "surrogatepass"), digest_size=POOL_ID_BYTES, person=_PERSON).digest()


@dataclass(slots=True)
class _Page:
    """What lies at one page of a chain, in all pools; it is not evictable while a part of it is being written."""

    parent: PageId
    used_ns: int
    entries: tuple[EntryId, ...] = ()
    reserved: tuple[tuple[EntryId, int], ...] = ()
    queued_ns: int = -1


class ChainIndex:
    """Entries, their sizes and the order in which they go. Pure bookkeeping: no I/O, no locks.

    A page is evictable when nothing is stored or being written behind it. All pools of a page go together. When a tail
    goes, the page before it takes over its age, so that a chain ages as a whole by its last use anywhere.
    """

    def __init__(self) -> None:
        self._sizes: dict[EntryId, int] = {}
        self._pages: dict[PageId, _Page] = {}
        self._children: dict[PageId, int] = {}
        self._queue: list[tuple[int, PageId]] = []
        self._refused: set[PageId] = set()
        self._stored_bytes = 0
        self._reserved_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all entries, those being written included."""
        return self._stored_bytes + self._reserved_bytes

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, entry: EntryId) -> bool:
        return entry in self._sizes

    def __iter__(self) -> Iterator[EntryId]:
        return iter(self._sizes)

    def entries_in(self, namespace: bytes) -> list[EntryId]:
        """The stored entries of a namespace (its fingerprint, 32 bytes)."""
        last = namespace_id(namespace)
        return [entry for entry in self._sizes if entry.endswith(last)]

    def size(self, entry: EntryId) -> int | None:
        """Bytes of a stored entry, None if it isn't stored."""
        return self._sizes.get(entry)

    def reserve(self, entry: EntryId, size_bytes: int) -> None:
        """Counts `size_bytes` for a write that has begun; the pages before it stay until it has ended."""
        self._page(entry, 0).reserved += ((entry, size_bytes),)
        self._reserved_bytes += size_bytes

    def cancel(self, entry: EntryId, size_bytes: int) -> bool:
        """Ends a write that failed: the entry is what it was before. False if no such write is known."""
        page_id = entry[:PAGE_ID_BYTES]
        page = self._pages.get(page_id)
        if page is None or (entry, size_bytes) not in page.reserved:
            return False
        page.reserved = _without(page.reserved, (entry, size_bytes))
        self._reserved_bytes -= size_bytes
        self._settle(page_id, page)
        return True

    def commit(self, entry: EntryId, size_bytes: int, used_ns: int) -> None:
        """Ends a write that succeeded: the entry is stored, in place of an older one."""
        self.add(entry, size_bytes, used_ns)
        self.cancel(entry, size_bytes)

    def refuse(self, entry: EntryId) -> None:
        """Remembers that there was no room for this entry's page, until it is stored."""
        if len(self._refused) >= _MOST_REFUSED:
            self._refused.clear()
        self._refused.add(entry[:PAGE_ID_BYTES])

    def is_behind_refused(self, entry: EntryId) -> bool:
        """Whether the page before it found no room: then this one, out of reach, must not push out what is in reach."""
        return entry[PAGE_ID_BYTES : 2 * PAGE_ID_BYTES] in self._refused

    def add(self, entry: EntryId, size_bytes: int, used_ns: int) -> None:
        """Counts a stored entry, in place of an older one."""
        self._refused.discard(entry[:PAGE_ID_BYTES])
        page = self._page(entry, used_ns)
        before = self._sizes.get(entry)
        if before is None:
            page.entries += (entry,)
        self._sizes[entry] = size_bytes
        self._stored_bytes += size_bytes - (before or 0)
        page.used_ns = max(page.used_ns, used_ns)
        self._settle(entry[:PAGE_ID_BYTES], page)

    def remove(self, entry: EntryId) -> bool:
        """Forgets a stored entry; False if it isn't stored."""
        size_bytes = self._sizes.pop(entry, None)
        if size_bytes is None:
            return False
        page_id = entry[:PAGE_ID_BYTES]
        page = self._pages[page_id]
        page.entries = _without(page.entries, entry)
        self._stored_bytes -= size_bytes
        self._settle(page_id, page)
        return True

    def touch(self, entry: EntryId, used_ns: int) -> int:
        """Makes the entry's page the most recently used; returns when it was used before, 0 if it isn't stored."""
        page = self._pages.get(entry[:PAGE_ID_BYTES])
        if page is None or entry not in self._sizes:
            return 0
        before = page.used_ns
        page.used_ns = max(before, used_ns)
        return before

    def victim(self) -> tuple[EntryId, ...]:
        """All entries of the page that goes next; empty when no page is evictable. It stays until it is removed."""
        while self._queue:
            queued_ns, page_id = self._queue[0]
            page = self._pages.get(page_id)
            if page is None or page.queued_ns != queued_ns or not self._evictable(page_id, page):
                heapq.heappop(self._queue)
                if page is not None and page.queued_ns == queued_ns:
                    page.queued_ns = -1
                continue
            if page.used_ns == queued_ns:
                return page.entries
            page.queued_ns = page.used_ns
            heapq.heapreplace(self._queue, (page.used_ns, page_id))
        return ()

    def last_used_ns(self, entry: EntryId) -> int:
        """When the entry's page was last used; the entry must be stored."""
        return self._pages[entry[:PAGE_ID_BYTES]].used_ns

    def _page(self, entry: EntryId, used_ns: int) -> _Page:
        page_id = entry[:PAGE_ID_BYTES]
        page = self._pages.get(page_id)
        if page is None:
            page = _Page(entry[PAGE_ID_BYTES : 2 * PAGE_ID_BYTES], used_ns)
            self._pages[page_id] = page
            self._children[page.parent] = self._children.get(page.parent, 0) + 1
        return page

    def _evictable(self, page_id: PageId, page: _Page) -> bool:
        return bool(page.entries) and not page.reserved and page_id not in self._children

    def _settle(self, page_id: PageId, page: _Page) -> None:
        """Queues a page that became evictable, or forgets one that became empty and frees the page before it."""
        if page.entries or page.reserved:
            if page.queued_ns < 0 and self._evictable(page_id, page):
                page.queued_ns = page.used_ns
                heapq.heappush(self._queue, (page.used_ns, page_id))
            return
        del self._pages[page_id]
        left = self._children[page.parent] - 1
        if left:
            self._children[page.parent] = left
            return
        del self._children[page.parent]
        parent = self._pages.get(page.parent)
        if parent is not None:
            parent.used_ns = max(parent.used_ns, page.used_ns)
            self._settle(page.parent, parent)


def _without(items: tuple[_Item, ...], item: _Item) -> tuple[_Item, ...]:
    """All but the first that equals `item`, which must be among them."""
    at = items.index(item)
    return items[:at] + items[at + 1 :]
