"""One process at a time changes records, and every other knows of each change before it changes one itself.

Within a turn changes are noted in memory. At its end the journal is told which slots to look at, then their records are
written: a process that is killed anywhere leaves no change that the others don't learn of.
"""

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import TypeAlias

from hicache.storage.chains import EntryId
from hicache.storage.file.disk import Disk
from hicache.storage.file.folder import Folder, Writer
from hicache.storage.file.journal import Journal, Place
from hicache.storage.file.records import NOBODY, Record, State
from hicache.storage.file.slot_file import SlotFile, slot_sizes
from hicache.storage.file.view import View
from hicache.storage.listing import StoredValue

_Snapshot: TypeAlias = tuple[int, Iterator[tuple[Record, int]]]
"""The size of slots, and what the records of all of them said at one moment."""

_TOUCH_NS = 60_000_000_000
"""A value's time of last use is kept on disk this exactly."""


class Ledger:
    """Records of all slots, in memory and on the disk. `view` is replaced when all of them have to be read again."""

    def __init__(self, folder: Folder, disk: Disk, patience_s: float) -> None:
        self._folder = folder
        self._disk = disk
        self._lock = threading.RLock()
        self._files: dict[int, SlotFile] = {}
        self._changes: dict[Place, tuple[Record, int]] = {}
        self._stale = False
        self._last_ns = 0
        self.view = View()
        self.stamp = 0
        """For all changes of the turn."""
        self._journal = Journal(folder.journal_path, patience_s)
        with self._journal.turn():
            folder.living_writers()
            self._writer = Writer(folder)
            self._journal.catch_up()
            snapshots = self._snapshots()
        # Others may go on meanwhile: what they change is news at the next turn.
        self.view = _built(snapshots)
        with self.turn():
            self.reclaim(frozenset())

    @property
    def writer_id(self) -> bytes:
        """Owner of what this process reserves."""
        return self._writer.id

    @contextmanager
    def turn(self) -> Iterator[View]:
        """Has the store to itself, among threads and processes, and knows what the others did.

        OSError if that can't be had, or if what was changed can't be written.
        """
        with self._lock, self._journal.turn():
            self._learn()
            self.stamp = self.view.last_stamp = max(self.view.last_stamp + 1, time.time_ns())
            try:
                yield self.view
            finally:
                self.tell()

    def learn(self) -> None:
        """Takes in what other processes did, if they did anything. OSError if that can't be had now."""
        if self._stale or self._journal.has_news():
            with self.turn():
                pass

    def change(self, place: Place, record: Record, used_ns: int = 0) -> None:
        """Gives a slot another record. In a turn only."""
        self.view.change(place, record, used_ns)
        self._changes[place] = (record, used_ns)

    def tell(self) -> None:
        """Writes what was changed since the turn began; it does so by itself at the end. In a turn only."""
        if not self._changes:
            return
        changes, self._changes = self._changes, {}
        self._stale = True
        self._journal.append(list(changes))
        for run in _runs(sorted(changes)):
            self.file(run[0].slot_bytes).note(run[0].slot, [changes[place] for place in run])
        self._stale = False

    def is_told(self, place: Place) -> bool:
        """Whether the record on the disk is the one in memory. In a turn only."""
        return place not in self._changes

    def refresh(self, place: Place) -> None:
        """Takes a slot's record from the disk, where it was found to be another one. In a turn only."""
        record, used_ns = self.file(place.slot_bytes).record(place.slot)
        if record != self.view.record(place):
            self.change(place, record, used_ns)

    def use(self, found: Sequence[tuple[EntryId, Place]]) -> None:
        """Notes that entries were used now."""
        if not found:
            return
        now_ns = self.now_ns()
        with self._lock:
            index = self.view.index
            old = [place for entry, place in found if now_ns - index.touch(entry, now_ns) > _TOUCH_NS]
        for place in old:
            with suppress(OSError):
                self.file(place.slot_bytes).touch(place.slot, now_ns)

    def entries_in(self, namespace: bytes) -> list[EntryId]:
        """The stored entries of a namespace (its fingerprint, 32 bytes), as far as this process knows."""
        with self._lock:
            return self.view.index.entries_in(namespace)

    def stored(self) -> list[StoredValue]:
        """Every value that is stored, as far as this process knows."""
        with self._lock:
            view = self.view
            found = [(entry, one[1]) for entry in view.index if (one := view.find(entry)) is not None]
            return [
                StoredValue(entry, record.value_bytes, view.index.last_used_ns(entry), record.owner != NOBODY)
                for entry, record in found
            ]

    def file(self, slot_bytes: int) -> SlotFile:
        """The file of slots of this size, made if there is none. OSError if it can't be opened."""
        file = self._files.get(slot_bytes)
        if file is not None:
            return file
        with self._lock:
            if slot_bytes not in self._files:
                self._files[slot_bytes] = SlotFile(self._folder.pages, slot_bytes, self._disk)
            return self._files[slot_bytes]

    def now_ns(self) -> int:
        """The time of day, but later at every call."""
        with self._lock:
            self._last_ns = max(self._last_ns + 1, time.time_ns())
            return self._last_ns

    def reclaim(self, writing: frozenset[Place]) -> int:
        """Frees what writers that are gone were writing or kept for themselves; returns how many slots. In a turn only.

        Of what this process reserved, all but the slots it is `writing` to is left over from a failure.
        """
        mine, owned = self._writer.id, self.view.owned
        freed = self.free_doubles()
        if all(owner == mine and place in writing for place, owner in owned.items()):
            return freed
        alive = self._folder.living_writers()
        left = [place for place, owner in owned.items() if not self._is_kept(place, owner, writing, alive)]
        for place in left:
            self.change(place, Record(State.FREE, self.stamp))
        return freed + len(left)

    def free_doubles(self) -> int:
        """Frees slots whose values have been replaced; returns how many. In a turn only."""
        doubles = list(self.view.doubles)
        for place in doubles:
            self.change(place, Record(State.FREE, self.stamp))
        return len(doubles)

    def sync(self) -> None:
        """Returns when all that was written is on the disk: values first, so that a record tells the truth."""
        with self._lock:
            files = list(self._files.values())
        for file in files:
            file.sync_values()
        for file in files:
            file.sync_records()
        self._folder.sync()

    def close(self) -> None:
        """Lets go of the folder; another process may have it open still."""
        self._writer.close()
        self._journal.close()
        for file in self._files.values():
            file.close()

    def _is_kept(self, place: Place, owner: bytes, writing: frozenset[Place], alive: frozenset[bytes]) -> bool:
        if owner == self._writer.id:
            return place in writing or self.view.record(place).state is State.STORED
        return owner in alive

    def _learn(self) -> None:
        news = None if self._stale else self._journal.news()
        if news is None:
            self._journal.catch_up()
            self.view = _built(self._snapshots())
            self._stale = False
            return
        for place in news:
            if place.slot_bytes in self._files or place.slot_bytes in slot_sizes(self._folder.pages):
                file = self.file(place.slot_bytes)
                if file.has(place.slot):
                    self.view.change(place, *file.record(place.slot))

    def _snapshots(self) -> list[_Snapshot]:
        sizes = sorted({*slot_sizes(self._folder.pages), *self._files})
        return [(size, self.file(size).all_records()) for size in sizes]


def _built(snapshots: list[_Snapshot]) -> View:
    view = View()
    # A million values are many objects, none of them garbage: looking for it takes longer than making them.
    was_on = gc.isenabled()
    gc.disable()
    try:
        for slot_bytes, records in snapshots:
            view.load(slot_bytes, records)
    finally:
        if was_on:
            gc.enable()
    return view


def _runs(places: list[Place]) -> Iterator[list[Place]]:
    """Cuts sorted places into runs of slots that follow each other."""
    for _, run in groupby(enumerate(places), lambda item: (item[1].slot_bytes, item[1].slot - item[0])):
        yield [place for _, place in run]
