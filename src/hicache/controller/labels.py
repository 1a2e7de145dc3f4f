"""A store that is attached is told what each namespace is before pages of it are stored; that decides nothing."""

from dataclasses import dataclass, field

from hicache.controller.state import State
from hicache.coverage import Full
from hicache.keys import Namespace
from hicache.storage import PageStore
from hicache.storage.description import Description, PoolNote
from hicache.storage.page_store import MOST_LABELS


@dataclass(slots=True)
class Labels:
    """Which namespaces the store has been told of."""

    _state: State
    _told: dict[bytes, None] = field(default_factory=dict)

    def tell(self, namespace: Namespace, store: PageStore) -> None:
        """Describe a namespace, once."""
        if namespace.fingerprint in self._told:
            return
        if len(self._told) >= MOST_LABELS:
            self._told.clear()
        self._told[namespace.fingerprint] = None
        for name, notes in self._pools(namespace.fingerprint).items():
            store.describe(name, Description.of(namespace, notes).text())

    def forget(self) -> None:
        """Another store is attached."""
        self._told.clear()

    def _pools(self, fingerprint: bytes) -> dict[bytes, list[PoolNote]]:
        """The pools that this rank writes, by what their namespace is called in storage."""
        state = self._state
        notes: dict[bytes, list[PoolNote]] = {}
        for entry in state.group.entries:
            if not state.writes(entry.name):
                continue
            name = state.dispatcher.place.namespace(fingerprint, replicated=entry.replicated)
            source = state.group.get_entry(entry.derived_from or entry.name)
            note = PoolNote(entry.name, entry.host_pool.layout.page_bytes, isinstance(source.coverage, Full))
            notes.setdefault(name, []).append(note)
        return notes
