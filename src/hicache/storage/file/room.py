"""The slots of a store never take more bytes on the disk than its cap, and of chains the tails make room."""

from collections.abc import Iterable

from hicache.storage.chains import EntryId
from hicache.storage.file.journal import Place
from hicache.storage.file.ledger import Ledger
from hicache.storage.file.records import Record, State
from hicache.storage.file.slot_file import slot_size
from hicache.storage.file.view import Shelf

_GROW_BYTES = 16 << 20
"""The most room that is taken from the disk ahead of need."""

_EVICTED_AT_ONCE = 256
"""Pages that go in one turn when a cap has become smaller: other processes have theirs in between."""


class Room:
    """Finds slots. All calls in a ledger's turn."""

    def __init__(self, ledger: Ledger, cap_bytes: int | None) -> None:
        self._ledger = ledger
        self._cap_bytes = cap_bytes
        self._writing: set[Place] = set()
        self._has_lost = False

    @property
    def writing(self) -> frozenset[Place]:
        """Slots that this process reserved and did not give back."""
        return frozenset(self._writing)

    def reserve(self, entry: EntryId, value_bytes: int) -> Place | None:
        """A slot for a value, which this process owns from now on; None if there is no room.

        There is none for a value larger than the cap, when only pages of its own chain could make room, and behind a
        page that found none. OSError if the disk can't give what is free by the cap.
        """
        ledger, size = self._ledger, slot_size(value_bytes)
        if self._has_lost:
            ledger.reclaim(self.writing)
            self._has_lost = False
        index = ledger.view.index
        place = None
        free = ledger.view.shelf(size).free
        if self._is_hopeless(entry, size):
            pass
        elif free:
            place = Place(size, next(reversed(free)))
        else:
            # The pages before it must not be the ones that go.
            index.reserve(entry, size)
            try:
                place = self._find(size)
            finally:
                index.cancel(entry, size)
        if place is None:
            index.refuse(entry)
            return None
        ledger.change(place, Record(State.RESERVED, ledger.stamp, ledger.writer_id, value_bytes, entry))
        self._writing.add(place)
        return place

    def done(self, places: Iterable[Place]) -> None:
        """Reserved slots have other records now."""
        self._writing.difference_update(places)

    def lose(self, places: Iterable[Place]) -> None:
        """What the records of reserved slots are is not known; they are reclaimed before the next is reserved."""
        self.done(places)
        self._has_lost = True

    def keep_cap(self) -> bool:
        """Lets go of what is beyond the cap, a part of it if it is much; True when no more can be done."""
        return self._cap_bytes is None or self.trim(self._cap_bytes)

    def trim(self, cap_bytes: int) -> bool:
        """Lets go of what is beyond so many bytes, a part of it if it is much; True when no more can be done."""
        ledger = self._ledger
        evicted = 0
        while ledger.view.allocated_bytes - ledger.view.free_bytes > cap_bytes and evicted < _EVICTED_AT_ONCE:
            if not self._evict():
                break
            evicted += 1
        ledger.tell()
        while ledger.view.allocated_bytes > cap_bytes:
            if not self._punch_free(0):
                return evicted == 0
        return True

    def punch(self, place: Place) -> None:
        """Gives the room of a free slot back to the disk."""
        ledger = self._ledger
        # Who reads the slot finds out by its record that it is not the value's any more.
        if not ledger.is_told(place):
            ledger.tell()
        ledger.file(place.slot_bytes).punch(place.slot)
        ledger.change(place, Record(State.HOLE, ledger.stamp))

    def _is_hopeless(self, entry: EntryId, size: int) -> bool:
        if self._cap_bytes is None:
            return False
        return size > self._cap_bytes or self._ledger.view.index.is_behind_refused(entry)

    def _find(self, size: int) -> Place | None:
        view = self._ledger.view
        shelf = view.shelf(size)
        while not shelf.free:
            left_bytes = None if self._cap_bytes is None else self._cap_bytes - view.allocated_bytes
            if left_bytes is None or left_bytes >= size:
                return self._grow(shelf, left_bytes)
            if not self._punch_free(size) and not self._evict():
                return None
        return Place(size, next(reversed(shelf.free)))

    def _grow(self, shelf: Shelf, left_bytes: int | None) -> Place:
        """Takes room from the disk: for holes, else for slots at the end; more at a time the more slots there are.

        Returns the first of them; the others are free.
        """
        ledger, size = self._ledger, shelf.slot_bytes
        ahead_bytes = _GROW_BYTES if left_bytes is None else min(_GROW_BYTES, left_bytes - size)
        most = 1 + min(len(shelf.records) // 4, ahead_bytes // size)
        first, count = shelf.hole_run(most) if shelf.holes else (len(shelf.records), most)
        ledger.file(size).allocate(first, count)
        for slot in reversed(range(first + 1, first + count)):
            ledger.change(Place(size, slot), Record(State.FREE, ledger.stamp))
        return Place(size, first)

    def _punch_free(self, besides: int) -> bool:
        """Gives one free slot back to the disk, of another size than `besides`; False if there is none."""
        for size, shelf in self._ledger.view.shelves.items():
            if shelf.free and size != besides:
                self.punch(Place(size, next(reversed(shelf.free))))
                return True
        return False

    def _evict(self) -> bool:
        """Frees the slots of the oldest tail; False if nothing more may go."""
        ledger = self._ledger
        victims = ledger.view.index.victim()
        if not victims:
            return ledger.reclaim(self.writing) > 0
        found = [place for entry in victims if (place := ledger.view.place(entry)) is not None]
        if not self._used_elsewhere(victims[0], found[0]):
            for place in found:
                ledger.change(place, Record(State.FREE, ledger.stamp))
        return True

    def _used_elsewhere(self, entry: EntryId, place: Place) -> bool:
        """Whether another process used it later than this one knew; then it isn't the oldest."""
        ledger = self._ledger
        _, used_ns = ledger.file(place.slot_bytes).record(place.slot)
        if used_ns <= ledger.view.index.last_used_ns(entry):
            return False
        ledger.view.index.touch(entry, used_ns)
        return True
