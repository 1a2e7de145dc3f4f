"""A store is looked over while others use it: what they change meanwhile is never taken for damage."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hicache.errors import ConfigError
from hicache.storage.chains import EntryId, namespace_id, page_id, pool_id
from hicache.storage.codec import HEADER_BYTES, Verdict, check_value, decode_header
from hicache.storage.description import Description
from hicache.storage.listing import ListsValues, StoredValue
from hicache.storage.protocol import Cleared

_BATCH_BYTES = 8 << 20
_NS_PER_S = 1_000_000_000

RESTED_S = 60.0
"""What was used within this time may be a chain that is being written: it is never called unreachable."""

Progress: TypeAlias = Callable[[int], None]
"""Told how many more values are done."""


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """What a store has of one namespace. `fingerprint` is empty where nothing tells it; `pages`: one in each pool."""

    fingerprint: bytes
    description: Description | None
    pages: int
    size_bytes: int
    used_s: float
    """Seconds since the epoch, of the page that was used last."""


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """What a store has in all. `taken_bytes` is what it takes on its disk, free room in it included."""

    namespaces: tuple[NamespaceSummary, ...]
    private: Cleared
    """Parts of requests that were taken off the device: for nobody but the process that is serving them."""
    pages: int
    size_bytes: int
    taken_bytes: int
    problems: tuple[str, ...]


@dataclass(slots=True)
class Verified:
    """What reading every value found. `damaged`: by reason; `gone`: removed by others before they were read."""

    good_pages: int = 0
    good_bytes: int = 0
    gone_pages: int = 0
    unread_pages: int = 0
    """The disk did not give them."""
    damaged: dict[str, int] = field(default_factory=dict)
    removed: Cleared = field(default_factory=Cleared)

    @property
    def damaged_pages(self) -> int:
        """All of them."""
        return sum(self.damaged.values())


@dataclass(frozen=True, slots=True)
class Tidied:
    """What a clean-up took away: left-overs of dead processes, pages no prefix leads to, and the oldest tails."""

    reclaimed: int
    unreachable: Cleared
    trimmed: Cleared


def summarise(store: ListsValues) -> StoreSummary:
    """Totals, and per namespace, the one used last first."""
    values, names = store.values(), _names(store)
    groups: dict[bytes, list[StoredValue]] = {}
    for value in values:
        if not value.private:
            groups.setdefault(value.namespace, []).append(value)
    rows = [_summary(store, group, names.get(namespace)) for namespace, group in groups.items()]
    private = [value for value in values if value.private]
    return StoreSummary(
        namespaces=tuple(sorted(rows, key=lambda row: -row.used_s)),
        private=Cleared(len(private), _bytes(private)),
        pages=len(values),
        size_bytes=_bytes(values),
        taken_bytes=store.taken_bytes(),
        problems=store.health(),
    )


def verify(store: ListsValues, values: Sequence[StoredValue], *, repair: bool, progress: Progress) -> Verified:
    """Reads every value and checks header and bytes. With `repair`, what is damaged is removed: then it is a miss."""
    found = Verified()
    for batch in _batches(values):
        bad = _verify_batch(store, batch, found)
        if repair and bad:
            # It may have been written anew meanwhile: what is good now stays.
            again = Verified()
            found.removed += store.remove(_verify_batch(store, bad, again))
        progress(len(batch))
    return found


def tidy(store: ListsValues, size_bytes: int | None, now_ns: int) -> Tidied:
    """Takes away what is of no use to anybody, then the oldest tails until `size_bytes` are left (None: all stay).

    `now_ns` is the time of day. Raises StorageError when the store can't be changed.
    """
    reclaimed = store.reclaim()
    described = {namespace_id(one): (one, what) for one, what in _described(store).items()}
    groups: dict[bytes, list[StoredValue]] = {}
    for value in store.values():
        if value.namespace in described and not value.private:
            groups.setdefault(value.namespace, []).append(value)
    lost = []
    for namespace, group in groups.items():
        fingerprint, what = described[namespace]
        whole = [pool_id(pool.name) for pool in what.pools if pool.whole]
        lost += unreachable(group, page_id(fingerprint, fingerprint), whole)
    rested = [value for value in lost if now_ns - value.used_ns > RESTED_S * _NS_PER_S]
    removed = store.remove(rested)
    return Tidied(reclaimed, removed, Cleared() if size_bytes is None else store.trim(size_bytes))


def unreachable(values: Iterable[StoredValue], root: bytes, whole: Sequence[bytes]) -> list[StoredValue]:
    """Values of a namespace behind a page that one of the pools `whole` lacks. Without such pools, gaps are normal."""
    if not whole:
        return []
    parents: dict[bytes, bytes] = {}
    pools: dict[bytes, set[bytes]] = {}
    pages: dict[bytes, list[StoredValue]] = {}
    for value in values:
        parents[value.page] = value.parent
        pools.setdefault(value.page, set()).add(value.pool)
        pages.setdefault(value.page, []).append(value)
    good = {root}
    lost: set[bytes] = set()
    for page in parents:
        path = []
        while page in parents and page not in good and page not in lost:
            path.append(page)
            page = parents[page]
        leads = page in good
        for one in reversed(path):
            leads = leads and pools[one].issuperset(whole)
            (good if leads else lost).add(one)
    return [value for page in lost for value in pages[page]]


def find_namespace(summary: StoreSummary, prefix: str) -> NamespaceSummary:
    """The one namespace whose fingerprint, in hexadecimal, begins with `prefix`. ConfigError for none, and for many."""
    found = [one for one in summary.namespaces if prefix and one.fingerprint.hex().startswith(prefix.lower())]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} namespaces begin with {prefix!r}; `hicache store ls` shows what there is")
    return found[0]


def _described(store: ListsValues) -> dict[bytes, Description]:
    parsed = {fingerprint: Description.parse(text) for fingerprint, text in store.descriptions().items()}
    return {fingerprint: what for fingerprint, what in parsed.items() if what is not None}


def _names(store: ListsValues) -> Mapping[bytes, tuple[bytes, Description]]:
    return {namespace_id(one): (one, what) for one, what in _described(store).items()}


def _summary(
    store: ListsValues, group: Sequence[StoredValue], named: tuple[bytes, Description] | None
) -> NamespaceSummary:
    fingerprint, what = named or (_fingerprint(store, group), None)
    used_s = max(value.used_ns for value in group) / _NS_PER_S
    return NamespaceSummary(fingerprint, what, len(group), _bytes(group), used_s)


def _fingerprint(store: ListsValues, group: Sequence[StoredValue]) -> bytes:
    """As the header of some value says."""
    for value in group[:8]:
        buffer = memoryview(bytearray(value.size_bytes))
        if store.look([value], [buffer]).ok[0] and check_value(value.entry, buffer) is Verdict.GOOD:
            info = decode_header(buffer[:HEADER_BYTES])
            return b"" if info is None else info.namespace
    return b""


def _verify_batch(store: ListsValues, batch: Sequence[StoredValue], found: Verified) -> list[StoredValue]:
    buffers = [memoryview(bytearray(value.size_bytes)) for value in batch]
    result = store.look(batch, buffers)
    bad = []
    for i, value in enumerate(batch):
        reason = _reason(value.entry, buffers[i]) if result.ok[i] else "cut short"
        if result.ok[i] and reason is None:
            found.good_pages += 1
            found.good_bytes += value.size_bytes
        elif result.ok[i] or result.damaged[i]:
            found.damaged[str(reason)] = found.damaged.get(str(reason), 0) + 1
            bad.append(value)
        elif result.failed[i]:
            found.unread_pages += 1
        else:
            found.gone_pages += 1
    return bad


def _reason(entry: EntryId, value: memoryview) -> str | None:
    verdict = check_value(entry, value)
    return None if verdict is Verdict.GOOD else verdict.value


def _batches(values: Sequence[StoredValue]) -> Iterator[list[StoredValue]]:
    batch: list[StoredValue] = []
    size_bytes = 0
    for value in values:
        batch.append(value)
        size_bytes += value.size_bytes
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _bytes(values: Iterable[StoredValue]) -> int:
    return sum(value.size_bytes for value in values)
