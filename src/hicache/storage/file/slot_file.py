"""All values of about one size lie in one file, each in a slot of its own; a second file tells what each slot is."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from hicache.storage.file.disk import Disk, entries_of
from hicache.storage.file.records import (
    RECORD_BYTES,
    STAMP_BYTES,
    UNKNOWN,
    USED_OFFSET,
    Record,
    decode,
    decode_stamp,
    encode,
    encode_used,
)
from hicache.storage.protocol import Buffers

BLOCK_BYTES = 4096

_LEAD_BYTES = 256
_NAME = re.compile(r"([0-9a-f]{12})\.slots")


def slot_size(value_bytes: int) -> int:
    """Bytes that a value takes on the disk: whole blocks, at least one."""
    return max(1, -(-value_bytes // BLOCK_BYTES)) * BLOCK_BYTES


def slot_sizes(folder: str) -> list[int]:
    """The slot sizes for which there are files in a folder; files of other names are passed over."""
    names = (_NAME.fullmatch(item.name) for item in entries_of(folder) if item.is_file(follow_symlinks=False))
    return sorted(size for match in names if match and (size := int(match[1], 16)) and size % BLOCK_BYTES == 0)


class SlotFile:
    """Values in slots of `slot_bytes`, and their records. Moves bytes; who may use which slot is decided elsewhere."""

    def __init__(self, folder: str, slot_bytes: int, disk: Disk) -> None:
        self.slot_bytes = slot_bytes
        self._disk = disk
        base = os.path.join(folder, f"{slot_bytes:012x}")
        self._values = disk.open(f"{base}.slots")
        try:
            self._records = disk.open(f"{base}.index")
        except OSError:
            os.close(self._values)
            raise

    def write(self, slot: int, value: Buffers) -> None:
        """Writes a value into a slot."""
        self._disk.write(self._values, _payload_first(value), slot * self.slot_bytes)

    def read(self, slot: int, value: Buffers) -> bool:
        """Fills a value's buffers from a slot; False if the file is too short."""
        return self._disk.read(self._values, _payload_first(value), slot * self.slot_bytes)

    def allocate(self, slot: int, count: int) -> None:
        """Takes room on the disk for slots that follow each other."""
        self._disk.allocate(self._values, slot * self.slot_bytes, count * self.slot_bytes)

    def punch(self, slot: int) -> None:
        """Gives a slot's room back to the disk."""
        self._disk.punch(self._values, slot * self.slot_bytes, self.slot_bytes)

    def length_bytes(self) -> int:
        """How long the file of values is."""
        return self._disk.size(self._values)

    def note(self, slot: int, records: Sequence[tuple[Record, int]]) -> None:
        """Writes the records of slots that follow each other, each with the time of last use."""
        data = b"".join(encode(record, used_ns) for record, used_ns in records)
        self._disk.note(self._records, data, slot * RECORD_BYTES)

    def touch(self, slot: int, used_ns: int) -> None:
        """Notes when a slot's value was last used; needs no turn."""
        self._disk.note(self._records, encode_used(used_ns), slot * RECORD_BYTES + USED_OFFSET)

    def record(self, slot: int) -> tuple[Record, int]:
        """What the file says of a slot now, and when it was last used."""
        data = os.pread(self._records, RECORD_BYTES, slot * RECORD_BYTES)
        return decode(data) or (UNKNOWN, 0)

    def is_still(self, slot: int, record: Record) -> bool:
        """Whether a slot's record is this one, without checking all of it: nobody changed the slot in between."""
        data = os.pread(self._records, STAMP_BYTES, slot * RECORD_BYTES)
        return len(data) == STAMP_BYTES and decode_stamp(data) == (record.state, record.stamp)

    def has(self, slot: int) -> bool:
        """Whether the files reach as far as this slot."""
        return slot < self._slots(self._disk.size(self._records))

    def all_records(self) -> Iterator[tuple[Record, int]]:
        """What the files say now of each slot, from the first on. A slot without an intact record is free."""
        data = _read_all(self._records, self._disk.size(self._records))
        return _decoded(data, self._slots(len(data)))

    def _slots(self, records_bytes: int) -> int:
        return max(-(-records_bytes // RECORD_BYTES), -(-self.length_bytes() // self.slot_bytes))

    def sync_values(self) -> None:
        """Returns when all values are on the disk."""
        self._disk.sync(self._values)

    def sync_records(self) -> None:
        """Returns when all records are on the disk."""
        self._disk.sync(self._records)

    def close(self) -> None:
        """Gives the files back."""
        for handle in (self._values, self._records):
            with suppress(OSError):
                os.close(handle)


def _payload_first(value: Buffers) -> Sequence[memoryview]:
    """A value's first 256 bytes go behind the others: a page's header then leaves its payload on whole blocks,

    which the kernel copies a good deal faster. It counts bytes, not parts: a value may be cut in any way.
    """
    if value and value[0].nbytes == _LEAD_BYTES:
        return [*value[1:], value[0]]
    lead, rest, missing = [], [], _LEAD_BYTES
    for part in value:
        lead.append(part[:missing])
        rest.append(part[missing:])
        missing -= lead[-1].nbytes
    return rest + lead


def _decoded(data: memoryview, slots: int) -> Iterator[tuple[Record, int]]:
    nothing = (UNKNOWN, 0)
    for start in range(0, slots * RECORD_BYTES, RECORD_BYTES):
        yield decode(data[start : start + RECORD_BYTES]) or nothing


def _read_all(handle: int, size_bytes: int) -> memoryview:
    buffer = memoryview(bytearray(size_bytes))
    done = 0
    while done < size_bytes:
        count = os.preadv(handle, [buffer[done:]], done)
        if count == 0:
            break
        done += count
    return buffer[:done]
