"""One private file per page: whole or absent, however a writer ends, and never more bytes than the cap allows.

A value is written to a file of its own name and then renamed. Nothing is synced to the disk: after a power cut a file
may be torn, which its length or its checksum shows, and a torn page is a miss.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from hicache.errors import ConfigError, StorageError
from hicache.storage.chains import ChainIndex, EntryId, entry_id
from hicache.storage.file.disk import Disk
from hicache.storage.file.folder import Folder, Temp, Writer
from hicache.storage.file.journal import Change, Journal, Record
from hicache.storage.file.trouble import Trouble
from hicache.storage.gate import Gate
from hicache.storage.protocol import Buffers, Cleared, ReadResult, StorageKey
from hicache.units import BoolArray

_LOG = logging.getLogger(__name__)

_TOUCH_NS = 60_000_000_000
"""A file's time of last use is kept on disk this exactly."""


_CLEARED_AT_ONCE = 256
"""Files that are removed in one turn: other processes have theirs in between."""


class FileBackend:
    """A StorageBackend in a folder; several processes may open one folder at a time, if each has the same cap.

    `cap_bytes` bounds the bytes of all page files, temporary ones included, at any moment; None: no bound. After an
    I/O error nothing is written for `retry_s` seconds; then the next write tries again. Another process that keeps the
    store to itself for more than `patience_s` seconds (it may be stopped) is such an error too. Raises ConfigError for
    a folder that is not a store's or is of another version, StorageError for one that can't be used. Open it after a
    fork, not before.
    """

    def __init__(
        self,
        root: str | Path,
        cap_bytes: int | None = None,
        *,
        retry_s: float = 5.0,
        patience_s: float = 5.0,
        disk: Disk | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if cap_bytes is not None and cap_bytes <= 0:
            raise ConfigError(f"cap is {cap_bytes} bytes; give a positive size, or none for no bound")
        if "\0" in str(root):
            raise ConfigError("a store's folder cannot have a NUL character in its name")
        self._cap_bytes = cap_bytes
        self._disk = disk or Disk()
        self._folder = Folder(os.path.abspath(root))
        self._gate = Gate(f"file store {self._folder.root}")
        self._trouble = Trouble(f"file store {self._folder.root}", retry_s, clock_s)
        self._lock = threading.RLock()
        self._index = ChainIndex()
        self._suspects: set[EntryId] = set()
        self._temp_count = 0
        self._last_ns = 0
        self._folder.claim()
        try:
            self._journal = Journal(self._folder.journal_path, patience_s)
            with self._journal.turn():
                if self._folder.reclaim():
                    self._journal.restart()
                self._writer = Writer(self._folder)
                self._list()
                self._make_room()
        except OSError as error:
            raise StorageError(f"cannot open the page store in {self._folder.root}: {error}") from error

    @property
    def root(self) -> Path:
        """The store's folder."""
        return Path(self._folder.root)

    @property
    def used_bytes(self) -> int:
        """Bytes of all page files as far as this process knows, those being written included."""
        return self._index.total_bytes

    def contains(self, keys: Sequence[StorageKey]) -> BoolArray:
        """Which pages are there now, shape [keys]: one look-up and one stat per page that is there."""
        with self._gate:
            # Without the news, pages of others are missing from the answer.
            if self._journal.has_news():
                with suppress(OSError), self._turn():
                    pass
            return np.array([self._is_there(entry_id(key)) for key in keys], dtype=np.bool_)

    def read(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> ReadResult:
        """Reads each file straight into the buffers; a file of another length is damaged, and removed."""
        result = ReadResult.nothing(len(keys))
        with self._gate:
            for i, (key, buffers) in enumerate(zip(keys, values, strict=True)):
                entry = entry_id(key)
                try:
                    size_bytes = self._disk.read(self._folder.page_path(entry), buffers)
                except FileNotFoundError:
                    self._forget(entry)
                except OSError as error:
                    # It may be the disk or only this page: it is written again when it comes by.
                    self._trouble.read_failed(error)
                    self._suspects.add(entry)
                    result.failed[i] = True
                else:
                    good = size_bytes == sum(part.nbytes for part in buffers)
                    self._note_read(entry, good)
                    result.ok[i] = good
                    result.damaged[i] = not good
        return result

    def write(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> BoolArray:
        """Writes each value beside its place and renames it; False while the store is paused after an error,

        for a value larger than the cap, and when only pages of its own chain could make room for it.
        """
        stored = np.zeros(len(keys), dtype=np.bool_)
        with self._gate:
            for i, (key, buffers) in enumerate(zip(keys, values, strict=True)):
                if self._trouble.is_paused():
                    break
                try:
                    stored[i] = self._put(entry_id(key), buffers)
                except OSError as error:
                    self._trouble.pause(error)
        return stored

    def delete(self, keys: Sequence[StorageKey]) -> BoolArray:
        """Removes files. True: one was there and is gone; what can't be removed is not reported any more."""
        with self._gate:
            return np.array([self._discard(entry_id(key)) for key in keys], dtype=np.bool_)

    def clear(self, namespace: bytes) -> Cleared:
        """Removes every file of a namespace; what can't be removed is at least not reported any more."""
        with self._gate:
            try:
                with self._turn():
                    entries = self._index.entries_in(namespace)
            except OSError as error:
                self._trouble.read_failed(error)
                with self._lock:
                    entries = self._index.entries_in(namespace)
            parts = [entries[start : start + _CLEARED_AT_ONCE] for start in range(0, len(entries), _CLEARED_AT_ONCE)]
            cleared = [self._clear(part) for part in parts]
            pages, size_bytes = sum(one.pages for one in cleared), sum(one.size_bytes for one in cleared)
            return Cleared(pages, size_bytes, sum(one.left_pages for one in cleared))

    def health(self) -> tuple[str, ...]:
        """Says whether writing is paused and why, and whether reading failed a short while ago."""
        return self._trouble.health()

    def close(self) -> None:
        """Waits for calls under way and lets go of the folder; another process may have it open still."""
        if self._gate.close():
            self._writer.close()
            self._journal.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Has the store to itself, among threads and processes, and knows what the others did."""
        with self._lock, self._journal.turn():
            news = self._journal.news()
            if news is None:
                self._list()
            else:
                self._apply(news)
            yield

    def _list(self) -> None:
        """Builds the index from what lies in the folders; reads no file."""
        index = ChainIndex()
        # Temporary files first: one that is renamed meanwhile is then seen under its new name.
        for temp in self._folder.temps():
            index.reserve(temp.entry, temp.size_bytes)
        for entry, status in self._folder.pages():
            index.add(entry, status.st_size, status.st_mtime_ns)
        self._index = index
        self._journal.catch_up()

    def _apply(self, news: Sequence[Record]) -> None:
        for record in news:
            if record.change is Change.RESERVED:
                self._index.reserve(record.entry, record.size_bytes)
            elif record.change is Change.CANCELLED:
                self._index.cancel(record.entry, record.size_bytes)
            elif record.change is Change.STORED:
                self._index.commit(record.entry, record.size_bytes, self._now_ns())
            else:
                self._index.remove(record.entry)

    def _put(self, entry: EntryId, buffers: Buffers) -> bool:
        size_bytes = sum(part.nbytes for part in buffers)
        reserved = self._reserve(entry, size_bytes)
        if reserved is None:
            return False
        temp, handle = reserved
        try:
            try:
                self._disk.write(handle, buffers)
            finally:
                os.close(handle)
            self._commit(temp)
        except OSError:
            self._abandon(temp)
            raise
        self._trouble.resume()
        return True

    def _reserve(self, entry: EntryId, size_bytes: int) -> tuple[Temp, int] | None:
        with self._turn():
            if self._cap_bytes is not None and (size_bytes > self._cap_bytes or self._index.is_behind_refused(entry)):
                self._index.refuse(entry)
                return None
            self._index.reserve(entry, size_bytes)
            self._temp_count += 1
            path = self._folder.temp_path(self._writer.name, self._temp_count, entry, size_bytes)
            temp = Temp(path, self._writer.name, entry, size_bytes)
            try:
                handle = self._disk.create(path) if self._make_room() else None
            except OSError:
                self._index.cancel(entry, size_bytes)
                raise
            if handle is None:
                self._index.cancel(entry, size_bytes)
                self._index.refuse(entry)
                return None
            self._tell(Change.RESERVED, entry, size_bytes)
            return temp, handle

    def _commit(self, temp: Temp) -> None:
        with self._turn():
            self._disk.replace(temp.path, self._folder.page_path(temp.entry))
            self._index.commit(temp.entry, temp.size_bytes, self._now_ns())
            self._suspects.discard(temp.entry)
            self._tell(Change.STORED, temp.entry, temp.size_bytes)

    def _abandon(self, temp: Temp) -> None:
        with suppress(OSError), self._turn():
            with suppress(FileNotFoundError):
                self._disk.remove(temp.path)
            self._index.cancel(temp.entry, temp.size_bytes)
            self._tell(Change.CANCELLED, temp.entry, temp.size_bytes)

    def _make_room(self) -> bool:
        """Removes the oldest tails until the cap holds; False when nothing more may go. In a turn only."""
        while self._cap_bytes is not None and self._index.total_bytes > self._cap_bytes:
            victims = self._index.victim()
            if not victims:
                return False
            if not self._used_elsewhere(victims[0]):
                for entry in victims:
                    self._remove(entry)
        return True

    def _used_elsewhere(self, entry: EntryId) -> bool:
        """Whether another process used it later than this one knew; then it isn't the oldest."""
        try:
            used_ns = self._disk.status(self._folder.page_path(entry)).st_mtime_ns
        except FileNotFoundError:
            return False
        if used_ns <= self._index.last_used_ns(entry):
            return False
        self._index.touch(entry, used_ns)
        return True

    def _remove(self, entry: EntryId) -> bool:
        """Removes a file; False if it was gone. In a turn only."""
        removed = True
        try:
            self._disk.remove(self._folder.page_path(entry))
        except FileNotFoundError:
            removed = False
        self._suspects.discard(entry)
        if self._index.remove(entry) or removed:
            self._tell(Change.REMOVED, entry, 0)
        return removed

    def _discard(self, entry: EntryId) -> bool:
        """Removes a file; if that can't be done, it is at least not taken for a good one."""
        self._suspects.add(entry)
        try:
            with self._turn():
                return self._remove(entry)
        except OSError as error:
            self._trouble.read_failed(error)
            return False

    def _clear(self, entries: Sequence[EntryId]) -> Cleared:
        """Removes some files in one turn."""
        pages = size_bytes = tried = 0
        self._suspects.update(entries)
        try:
            with self._turn():
                for entry in entries:
                    entry_bytes = self._index.size(entry) or 0
                    removed = self._remove(entry)
                    tried += 1
                    pages += removed
                    size_bytes += entry_bytes if removed else 0
        except OSError as error:
            self._trouble.read_failed(error)
        return Cleared(pages, size_bytes, len(entries) - tried)

    def _forget(self, entry: EntryId) -> None:
        """The file is gone: another process, or the user, removed it."""
        with self._lock:
            self._index.remove(entry)

    def _is_there(self, entry: EntryId) -> bool:
        size_bytes = self._index.size(entry)
        if size_bytes is None or entry in self._suspects:
            return False
        try:
            found_bytes = self._disk.status(self._folder.page_path(entry)).st_size
        except FileNotFoundError:
            self._forget(entry)
            return False
        except OSError as error:
            self._trouble.read_failed(error)
            return False
        if found_bytes != size_bytes:
            self._discard(entry)
            return False
        return True

    def _note_read(self, entry: EntryId, good: bool) -> None:
        if not good:
            self._discard(entry)
            return
        now_ns = self._now_ns()
        with self._lock:
            self._suspects.discard(entry)
            before_ns = self._index.touch(entry, now_ns)
        if now_ns - before_ns > _TOUCH_NS:
            with suppress(OSError):
                self._disk.touch(self._folder.page_path(entry), now_ns)

    def _tell(self, change: Change, entry: EntryId, size_bytes: int) -> None:
        # If it can't be told now, the journal makes the others list the folders later.
        with suppress(OSError):
            self._journal.append(Record(change, entry, size_bytes))

    def _now_ns(self) -> int:
        with self._lock:
            self._last_ns = max(self._last_ns + 1, time.time_ns())
            return self._last_ns
