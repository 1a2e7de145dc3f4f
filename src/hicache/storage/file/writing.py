"""A value is written into a slot of its own first, and is part of the store only once its record says so."""

from collections.abc import Callable, Sequence

import numpy as np

from hicache.storage.chains import entry_id
from hicache.storage.file.journal import Place
from hicache.storage.file.ledger import Ledger
from hicache.storage.file.records import NOBODY, Record, State
from hicache.storage.file.room import Room
from hicache.storage.file.trouble import Trouble
from hicache.storage.protocol import Buffers, StorageKey
from hicache.units import BoolArray


class Writing:
    """Reserves slots, fills them, stores them: each batch in two turns, with other processes' in between."""

    def __init__(self, ledger: Ledger, room: Room, trouble: Trouble) -> None:
        self._ledger = ledger
        self._room = room
        self._trouble = trouble

    def store(self, keys: Sequence[StorageKey], values: Sequence[Buffers], fill: Callable[[int], None]) -> BoolArray:
        """Which of a batch's values are stored now; bool, shape [keys]. Calls `fill(index)` before a value is used."""
        stored = np.zeros(len(keys), dtype=np.bool_)
        places = self._reserve(keys, values)
        done = self._write_values(places, values, fill)
        if self._settle(keys, places, done):
            stored[:done] = [place is not None for place in places[:done]]
            if done and done == len(keys):
                self._trouble.resume()
        return stored

    def _reserve(self, keys: Sequence[StorageKey], values: Sequence[Buffers]) -> Sequence[Place | None]:
        """Slots for the values, None where there is no room; fewer than values after an error."""
        places: list[Place | None] = []
        try:
            with self._ledger.turn():
                try:
                    for key, value in zip(keys, values, strict=True):
                        places.append(self._room.reserve(entry_id(key), size_of(value)))
                except OSError as error:
                    self._trouble.pause(error)
        except OSError as error:
            self._trouble.pause(error)
            self._room.lose(place for place in places if place is not None)
            return []
        return places

    def _write_values(
        self, places: Sequence[Place | None], values: Sequence[Buffers], fill: Callable[[int], None]
    ) -> int:
        """Returns how many it got through before an error, from the first on."""
        for i, place in enumerate(places):
            if place is None:
                continue
            fill(i)
            try:
                self._ledger.file(place.slot_bytes).write(place.slot, values[i])
            except OSError as error:
                self._trouble.pause(error)
                return i
        return len(places)

    def _settle(self, keys: Sequence[StorageKey], places: Sequence[Place | None], done: int) -> bool:
        """Stores the first `done` values and gives the other slots back. False: none of them is sure to be there."""
        ledger, taken = self._ledger, [(i, place) for i, place in enumerate(places) if place is not None]
        try:
            with ledger.turn() as view:
                now_ns = ledger.now_ns()
                for i, place in taken:
                    record = view.record(place)
                    if i < done:
                        owner = ledger.writer_id if keys[i].private else NOBODY
                        stored = Record(State.STORED, ledger.stamp, owner, record.value_bytes, record.entry)
                        ledger.change(place, stored, now_ns)
                    else:
                        ledger.change(place, Record(State.FREE, ledger.stamp))
                ledger.free_doubles()
        except OSError as error:
            self._trouble.pause(error)
            self._room.lose(place for _, place in taken)
            return False
        self._room.done(place for _, place in taken)
        return True


def size_of(value: Buffers) -> int:
    """Bytes of all parts of a value."""
    return sum(part.nbytes for part in value)
