"""What owner and workers say to each other: frozen messages one way, frozen completions the other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from hicache.pools import BackupPlan, LoadPlan
from hicache.storage import Cleared, PageStore, StorageKey
from hicache.transfer.progress import LayerProgress
from hicache.units import BoolArray, PoolName


class Event(Protocol):
    """A point in a stream of device work, such as the end of the computation that writes a page."""

    def query(self) -> bool:
        """Whether all work before the point is done. Never blocks."""

    def wait(self) -> None:
        """Return once all work before the point is done, or make the calling worker's stream wait for it."""


@dataclass(frozen=True, slots=True)
class Backup:
    """L1 to L2, once `after` has passed."""

    id: int
    plan: BackupPlan
    after: Event | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """L2 to L1, layer by layer; `progress` tells the computation which layers have arrived."""

    id: int
    plan: LoadPlan
    progress: LayerProgress


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Pages of one pool: their keys in storage and views of their host pages (contiguous, whole), pair by pair."""

    pool: PoolName
    keys: tuple[StorageKey, ...]
    pages: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """L2 to L3, in the order given."""

    id: int
    store: PageStore
    content: tuple[StoredPages, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """L3 to L2."""

    id: int
    store: PageStore
    content: tuple[StoredPages, ...]


@dataclass(frozen=True, slots=True)
class Query:
    """Which pages are in L3."""

    id: int
    store: PageStore
    keys: Mapping[PoolName, tuple[StorageKey, ...]]


@dataclass(frozen=True, slots=True)
class Delete:
    """Pages that nobody will ask of L3 any more. Runs after the stores that were submitted before it."""

    id: int
    store: PageStore
    keys: tuple[StorageKey, ...]


@dataclass(frozen=True, slots=True)
class Clear:
    """All pages of some namespaces in L3. Runs after the stores that were submitted before it."""

    id: int
    store: PageStore
    namespaces: tuple[bytes, ...]


CLEARED: PoolName = "storage"
"""Under this name the completion of a Clear says whether nothing was left."""

Message: TypeAlias = Backup | Load | Store | Fetch | Query | Delete | Clear


@dataclass(frozen=True, slots=True)
class Completion:
    """A transfer has ended: nothing touches its slots any more. `good`: per pool, in order, which pages are right.

    A pool that is missing in `good` failed as a whole; `error` is the first thing that went wrong, if anything did.
    `late`: somebody went on without a layer that had not arrived.
    """

    id: int
    good: Mapping[PoolName, BoolArray] = field(default_factory=dict)
    error: str | None = None
    late: bool = False
    cleared: Cleared = field(default_factory=Cleared)
    """What a Clear took away on this rank: a number to show, nothing to decide by."""
