"""What one process knows of a store: each slot's record, where each entry lies, and in which order entries go."""

from collections.abc import Iterable

from hicache.storage.chains import ChainIndex, EntryId
from hicache.storage.file.journal import Place
from hicache.storage.file.records import NOBODY, Record, State

_UNSEEN = Record(State.HOLE, 0)


class Shelf:
    """The slots of one size, in memory. `free` and `holes` hold their numbers; the one noted last is taken first."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.records: list[Record] = []
        self.free: dict[int, None] = {}
        self.holes: dict[int, None] = {}

    @property
    def allocated_bytes(self) -> int:
        """Bytes that all slots take on the disk, whatever is in them."""
        return (len(self.records) - len(self.holes)) * self.slot_bytes

    def hole_run(self, most: int) -> tuple[int, int]:
        """Holes that follow each other: the first, and how many, at most `most`. There must be one."""
        last = first = next(reversed(self.holes))
        while last - first + 1 < most and first - 1 in self.holes:
            first -= 1
        return first, last - first + 1

    def put(self, slot: int, record: Record) -> Record:
        """Sets a slot's record and returns the one before; slots below it that were never seen become holes."""
        while len(self.records) <= slot:
            self.holes[len(self.records)] = None
            self.records.append(_UNSEEN)
        before = self.records[slot]
        if before.state is State.FREE:
            del self.free[slot]
        elif before.state is State.HOLE:
            del self.holes[slot]
        if record.state is State.FREE:
            self.free[slot] = None
        elif record.state is State.HOLE:
            self.holes[slot] = None
        self.records[slot] = record
        return before


class View:
    """Pure bookkeeping: no I/O, no locks. `find` may be called while another thread changes the view."""

    def __init__(self) -> None:
        self.index = ChainIndex()
        self.shelves: dict[int, Shelf] = {}
        self.owned: dict[Place, bytes] = {}
        """Slots that have an owner, and whom."""
        self.doubles: dict[Place, None] = {}
        """Slots whose value has been replaced by a later one in another slot: to be freed."""
        self.last_stamp = 0
        self._places: dict[EntryId, Place] = {}

    @property
    def allocated_bytes(self) -> int:
        """Bytes that all slots take on the disk."""
        return sum(shelf.allocated_bytes for shelf in self.shelves.values())

    @property
    def free_bytes(self) -> int:
        """Of these, those of slots in which nothing of use is."""
        return sum(len(shelf.free) * shelf.slot_bytes for shelf in self.shelves.values())

    def shelf(self, slot_bytes: int) -> Shelf:
        """The slots of one size, none at first."""
        shelf = self.shelves.get(slot_bytes)
        if shelf is None:
            shelf = self.shelves[slot_bytes] = Shelf(slot_bytes)
        return shelf

    def find(self, entry: EntryId) -> tuple[Place, Record] | None:
        """Where an entry's value lies, with the record of its slot; None if it is not stored."""
        place = self._places.get(entry)
        if place is None:
            return None
        record = self.record(place)
        return (place, record) if record.state is State.STORED and record.entry == entry else None

    def record(self, place: Place) -> Record:
        """What is known of a slot that was seen before."""
        return self.shelves[place.slot_bytes].records[place.slot]

    def place(self, entry: EntryId) -> Place | None:
        """Where an entry's value lies; None if it is not stored."""
        return self._places.get(entry)

    def change(self, place: Place, record: Record, used_ns: int) -> None:
        """Notes that a slot has another record now."""
        size, slot = place
        before = self.shelf(size).put(slot, record)
        self.last_stamp = max(self.last_stamp, record.stamp)
        self.doubles.pop(place, None)
        if record.owner != NOBODY:
            self.owned[place] = record.owner
        elif before.owner != NOBODY:
            del self.owned[place]
        if record.state is State.RESERVED:
            self.index.reserve(record.entry, size)
        elif record.state is State.STORED:
            self._store(place, record, used_ns)
        if before.state is State.RESERVED:
            self.index.cancel(before.entry, size)
        elif before.state is State.STORED and (record.state is not State.STORED or record.entry != before.entry):
            self._forget(place, before.entry)

    def load(self, slot_bytes: int, records: Iterable[tuple[Record, int]]) -> None:
        """Notes the records of all slots of a size that was not seen before, with the times of last use."""
        shelf = self.shelf(slot_bytes)
        for slot, (record, used_ns) in enumerate(records):
            shelf.records.append(record)
            if record.state is State.STORED:
                self._store(Place(slot_bytes, slot), record, used_ns)
            elif record.state is State.RESERVED:
                self.index.reserve(record.entry, slot_bytes)
            else:
                (shelf.free if record.state is State.FREE else shelf.holes)[slot] = None
            if record.owner != NOBODY:
                self.owned[Place(slot_bytes, slot)] = record.owner
        self.last_stamp = max(self.last_stamp, *(record.stamp for record in shelf.records), 0)

    def _store(self, place: Place, record: Record, used_ns: int) -> None:
        older = self._places.get(record.entry)
        if older is not None and older != place:
            if self.record(older).stamp > record.stamp:
                self.doubles[place] = None
                return
            self.doubles[older] = None
        self._places[record.entry] = place
        self.index.add(record.entry, place.slot_bytes, used_ns)

    def _forget(self, place: Place, entry: EntryId) -> None:
        if self._places.get(entry) == place:
            del self._places[entry]
            self.index.remove(entry)
