"""Values lie in slots that are taken again: whole or absent, however a writer ends, and never beyond the cap.

A value is written into a slot that is its writer's alone, and becomes part of the store by one small record. What is
acknowledged outlives the process. It outlives a power cut if `sync` came after it; else it may be torn, which a page's
checksum shows, and a torn page is a miss.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from hicache.errors import ConfigError, StorageError
from hicache.storage.chains import EntryId, entry_id
from hicache.storage.file.disk import Disk
from hicache.storage.file.folder import Folder
from hicache.storage.file.journal import Place
from hicache.storage.file.labels import Labels
from hicache.storage.file.ledger import Ledger
from hicache.storage.file.records import Record, State
from hicache.storage.file.room import Room
from hicache.storage.file.trouble import Trouble
from hicache.storage.file.writing import Writing, size_of
from hicache.storage.gate import Gate
from hicache.storage.listing import StoredValue
from hicache.storage.protocol import Buffers, Cleared, ReadResult, StorageKey
from hicache.units import BoolArray

_BATCH_BYTES = 32 << 20
_BATCH_PAGES = 256
"""Pages that are reserved, written and stored together: other processes have their turns in between."""

_DAMAGED = Place(0, 0)
"""No slot: what was looked for is there and wrong."""

_STALE_S = 3600.0
"""A temporary file of this age is nobody's any more."""

_READ_TRIES = 3
"""A value that is replaced while it is read is read again, so many times in all."""


class FileBackend:
    """A StorageBackend in a folder; several processes may open one folder at a time, if each has the same cap.

    `cap_bytes` bounds the bytes that all values take on the disk (whole blocks of 4 KiB), those being written and free
    slots included, at any moment; None: no bound. Records come on top: 128 bytes per value. After an I/O error nothing
    is written for `retry_s` seconds; then the next write tries again. Another process that keeps the store to itself
    for more than `patience_s` seconds (it may be stopped) is such an error too. With `sync_s`, a write that comes
    later than that after the last sync ends with one. Raises ConfigError for a folder that is not a store's or is of
    another version, StorageError for one that can't be used. Open it after a fork, not before.
    """

    def __init__(
        self,
        root: str | Path,
        cap_bytes: int | None = None,
        *,
        retry_s: float = 5.0,
        patience_s: float = 5.0,
        sync_s: float | None = None,
        disk: Disk | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if cap_bytes is not None and cap_bytes <= 0:
            raise ConfigError(f"cap is {cap_bytes} bytes; give a positive size, or none for no bound")
        if "\0" in str(root):
            raise ConfigError("a store's folder cannot have a NUL character in its name")
        folder = Folder(os.path.abspath(root))
        name = f"file store {folder.root}"
        self._root = Path(folder.root)
        self._gate = Gate(name)
        self._trouble = Trouble(name, retry_s, clock_s)
        self._clock_s = clock_s
        self._sync_s = sync_s
        self._synced_s = clock_s()
        self._suspects: set[EntryId] = set()
        self._labels = Labels(folder.namespaces)
        folder.claim()
        try:
            self._ledger = Ledger(folder, disk or Disk(), patience_s)
            self._room = Room(self._ledger, cap_bytes)
            self._writing = Writing(self._ledger, self._room, self._trouble)
            is_kept = False
            while not is_kept:
                with self._ledger.turn():
                    is_kept = self._room.keep_cap()
        except OSError as error:
            raise StorageError(f"cannot open the page store in {folder.root}: {error}") from error

    @property
    def root(self) -> Path:
        """The store's folder."""
        return self._root

    @property
    def used_bytes(self) -> int:
        """Bytes that all values take on the disk as far as this process knows, those being written included."""
        return self._ledger.view.index.total_bytes

    @property
    def disk_bytes(self) -> int:
        """`used_bytes` and the free slots: what the cap bounds."""
        return self._ledger.view.allocated_bytes

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """Which pages are there now, shape [keys]: a look-up in memory each, and one stat per size of pages."""
        with self._gate:
            self._learn()
            lengths: dict[int, int] = {}
            return np.array([self._is_there(entry_id(key), lengths) for key in keys], dtype=np.bool_)

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """Reads each value straight into the buffers; one of another length is damaged, and removed."""
        return self.read_each(keys, values, lambda index: True)

    def read_each(
        self, keys: Sequence[StorageKey], values: Sequence[Buffers], is_good: Callable[[int], bool]
    ) -> ReadResult:
        """As `read`; what is found not to be good is damaged too."""
        result = ReadResult.nothing(len(keys))
        with self._gate:
            self._learn()
            used: list[tuple[EntryId, Place]] = []
            for i, (key, buffers) in enumerate(zip(keys, values, strict=True)):
                entry = entry_id(key)
                try:
                    place = self._read(entry, buffers)
                except OSError as error:
                    # It may be the disk or only this page: it is written again when it comes by.
                    self._trouble.read_failed(error)
                    self._suspects.add(entry)
                    result.failed[i] = True
                    continue
                if place is None:
                    continue
                result.ok[i] = place is not _DAMAGED and is_good(i)
                result.damaged[i] = not result.ok[i]
                if result.ok[i]:
                    self._suspects.discard(entry)
                    used.append((entry, place))
                else:
                    self._discard([entry])
            self._ledger.use(used)
        return result

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """Writes each value into a slot of its own, then stores all of a batch by their records.

        False while the store is paused after an error, for a value larger than the cap, and when only pages of its own
        chain, or of this batch, could make room for it.
        """
        return self.write_each(keys, values, lambda index: None)

    def write_each(
        self, keys: Sequence[StorageKey], values: Sequence[Buffers], fill: Callable[[int], None]
    ) -> BoolArray:
        """As `write`, with values that are filled when their turn comes."""
        stored = np.zeros(len(keys), dtype=np.bool_)
        with self._gate:
            start = 0
            while start < len(keys) and not self._trouble.is_paused():
                stop = _batch_end(values, start)
                batch = keys[start:stop]
                stored[start:stop] = self._writing.store(batch, values[start:stop], partial(_shifted, fill, start))
                if self._suspects:
                    written = zip(batch, stored[start:stop], strict=True)
                    self._suspects.difference_update(entry_id(key) for key, yes in written if yes)
                start = stop
            if self._sync_s is not None and self._clock_s() - self._synced_s >= self._sync_s:
                self._sync()
        return stored

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """Frees slots and gives their room back to the disk. True: a value was there and is gone.

        What can't be removed is not reported any more.
        """
        with self._gate:
            return np.array([self._discard([entry_id(key)]).pages for key in keys], dtype=np.bool_)

    def clear(self, namespace: bytes) -> Cleared:
        """Removes every value of a namespace; what can't be removed is at least not reported any more."""
        with self._gate:
            self._learn()
            cleared = self._discard_all(self._ledger.entries_in(namespace))
            self._labels.drop(namespace)
            return cleared

    def values(self) -> Sequence[StoredValue]:
        """Everything that is stored now, other processes' values included."""
        with self._gate:
            self._learn()
            return self._ledger.stored()

    def look(self, values: Sequence[StoredValue], buffers: Sequence[memoryview]) -> ReadResult:
        """Reads values without using them. One that was removed meanwhile is none of ok, damaged and failed."""
        result = ReadResult.nothing(len(values))
        with self._gate:
            for i, (value, buffer) in enumerate(zip(values, buffers, strict=True)):
                try:
                    place = self._read(value.entry, [buffer])
                except OSError:
                    result.failed[i] = True
                    continue
                result.damaged[i] = place is _DAMAGED
                result.ok[i] = place is not None and place is not _DAMAGED
        return result

    def remove(self, values: Sequence[StoredValue]) -> Cleared:
        """Frees the slots of values."""
        with self._gate:
            return self._discard_all([value.entry for value in values])

    def reclaim(self) -> int:
        """Frees the slots, and removes the temporary files, of processes that are gone. Raises StorageError."""
        with self._gate:
            return self._tidy(lambda: self._ledger.reclaim(self._room.writing)) + self._labels.drop_temporaries(
                time.time() - _STALE_S
            )

    def trim(self, size_bytes: int) -> Cleared:
        """Evicts down to `size_bytes` on the disk, and gives that room back to it."""
        with self._gate:
            before, before_bytes = len(self._ledger.view.index), self.used_bytes
            while not self._tidy(lambda: self._room.trim(size_bytes)):
                pass
            # Others may have stored something meanwhile.
            pages, freed_bytes = before - len(self._ledger.view.index), before_bytes - self.used_bytes
            return Cleared(max(0, pages), max(0, freed_bytes))

    def taken_bytes(self) -> int:
        """Bytes of all slots on the disk."""
        with self._gate:
            self._learn()
            return self.disk_bytes

    def describe(self, namespace: bytes, text: str) -> None:
        """Keeps a text about a namespace in a small file; what is there stays."""
        with self._gate, suppress(OSError):
            self._labels.put(namespace, text)

    def descriptions(self) -> Mapping[bytes, str]:
        """The texts of all namespaces that have one."""
        with self._gate:
            return self._labels.all()

    def sync(self) -> None:
        """Returns when every value acknowledged before is safe from a power cut. Raises StorageError if it isn't."""
        with self._gate:
            try:
                self._ledger.sync()
            except OSError as error:
                raise StorageError(f"cannot sync the page store in {self._root}: {error}") from error

    def health(self) -> tuple[str, ...]:
        """Says whether writing is paused and why, and whether reading failed a short while ago."""
        return self._trouble.health()

    def close(self) -> None:
        """Waits for calls under way and lets go of the folder; another process may have it open still."""
        if self._gate.close():
            self._ledger.close()

    def _learn(self) -> None:
        """Without the news, pages of others are missing from the answer."""
        with suppress(OSError):
            self._ledger.learn()

    def _is_there(self, entry: EntryId, lengths: dict[int, int]) -> bool:
        found = self._ledger.view.find(entry)
        if found is None or entry in self._suspects:
            return False
        place, record = found
        size = place.slot_bytes
        try:
            if size not in lengths:
                lengths[size] = self._ledger.file(size).length_bytes()
        except OSError as error:
            self._trouble.read_failed(error)
            return False
        if place.slot * size + record.value_bytes > lengths[size]:
            self._discard([entry])
            return False
        return True

    def _read(self, entry: EntryId, buffers: Buffers) -> Place | None:
        """Where the value was read from; _DAMAGED if it has another length, None if there is none."""
        size_bytes = size_of(buffers)
        for _ in range(_READ_TRIES):
            found = self._ledger.view.find(entry)
            if found is None:
                return None
            place, record = found
            if record.value_bytes != size_bytes:
                return _DAMAGED
            file = self._ledger.file(place.slot_bytes)
            whole = file.read(place.slot, buffers)
            if file.is_still(place.slot, record):
                return place if whole else _DAMAGED
            # It was replaced or evicted meanwhile, or its record is damaged.
            with suppress(OSError), self._ledger.turn():
                self._ledger.refresh(place)
        return None

    def _discard_all(self, entries: Sequence[EntryId]) -> Cleared:
        unique = list(dict.fromkeys(entries))
        parts = [unique[start : start + _BATCH_PAGES] for start in range(0, len(unique), _BATCH_PAGES)]
        return sum((self._discard(part) for part in parts), Cleared())

    def _tidy(self, step: Callable[[], int]) -> int:
        try:
            with self._ledger.turn():
                return step()
        except OSError as error:
            raise StorageError(f"cannot tidy the page store in {self._root}: {error}") from error

    def _discard(self, entries: Sequence[EntryId]) -> Cleared:
        """Removes values in one turn; if that can't be done, they are at least not taken for good ones."""
        self._suspects.update(entries)
        ledger = self._ledger
        try:
            with ledger.turn() as view:
                found = [one for entry in entries if (one := view.find(entry)) is not None]
                for place, _ in found:
                    ledger.change(place, Record(State.FREE, ledger.stamp))
                ledger.tell()
                for place, _ in found:
                    # A slot that keeps its room on the disk is taken again all the same.
                    with suppress(OSError):
                        self._room.punch(place)
        except OSError as error:
            self._trouble.read_failed(error)
            return Cleared(0, 0, len(entries))
        self._suspects.difference_update(entries)
        return Cleared(len(found), sum(record.value_bytes for _, record in found))

    def _sync(self) -> None:
        self._synced_s = self._clock_s()
        try:
            self._ledger.sync()
        except OSError as error:
            self._trouble.pause(error)


def _shifted(call: Callable[[int], None], start: int, index: int) -> None:
    call(start + index)


def _batch_end(values: Sequence[Buffers], start: int) -> int:
    """Where the batch that begins at `start` ends: at its size or number of pages, and after one page at least."""
    size_bytes = 0
    for stop in range(start, min(start + _BATCH_PAGES, len(values))):
        size_bytes += size_of(values[stop])
        if size_bytes > _BATCH_BYTES and stop > start:
            return stop
    return min(start + _BATCH_PAGES, len(values))
