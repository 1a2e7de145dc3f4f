"""What a store knows of one slot: 128 bytes that prove themselves; a record that doesn't is a slot without a value."""

import struct
from enum import IntEnum
from typing import NamedTuple

from hicache.storage.chains import ENTRY_ID_BYTES, EntryId
from hicache.storage.codec import checksum

RECORD_BYTES = 128
"""Records lie side by side and none crosses a sector: a power cut leaves an old or a new one."""

WRITER_ID_BYTES = 8
NOBODY = bytes(WRITER_ID_BYTES)

_FIELDS = struct.Struct(f"<B7xQ{WRITER_ID_BYTES}sQ{ENTRY_ID_BYTES}s")
_CRC = struct.Struct("<I")
_USED = struct.Struct("<Q")
_ALL = struct.Struct(f"{_FIELDS.format}I4xQ")
_STAMP = struct.Struct("<B7xQ")

USED_OFFSET = _FIELDS.size + 8
"""Where the time of last use lies, outside the checksum: it is noted without a turn, and decides only an order."""

STAMP_BYTES = _STAMP.size


class State(IntEnum):
    """What a slot is. The values are those on the disk."""

    HOLE = 1
    """It takes no room on the disk."""
    FREE = 2
    """It takes room, and nothing in it is of use."""
    RESERVED = 3
    """Its owner is writing a value into it."""
    STORED = 4
    """It holds a value, whole."""


_STATES = {state.value: state for state in State}


class Record(NamedTuple):
    """A slot's state. `stamp` is another one at every turn in which a slot changes, and later ones are larger.

    `owner` is the writer of a value that is being written or that nobody else will read, else NOBODY.
    """

    state: State
    stamp: int
    owner: bytes = NOBODY
    value_bytes: int = 0
    entry: EntryId = bytes(ENTRY_ID_BYTES)


UNKNOWN = Record(State.FREE, 0)
"""What a slot is of which no intact record tells."""


def encode(record: Record, used_ns: int) -> bytes:
    """The bytes of a record, with the time of its value's last use."""
    body = _FIELDS.pack(record.state, record.stamp, record.owner, record.value_bytes, record.entry)
    return (body + _CRC.pack(checksum(body)) + bytes(4) + _USED.pack(used_ns)).ljust(RECORD_BYTES, b"\0")


def decode(data: bytes | memoryview) -> tuple[Record, int] | None:
    """A record and the time of last use; None if the bytes are not those of an intact one."""
    if len(data) != RECORD_BYTES:
        return None
    number, stamp, owner, value_bytes, entry, crc, used_ns = _ALL.unpack_from(data)
    state = _STATES.get(number)
    if state is None or crc != checksum(data[: _FIELDS.size]):
        return None
    return Record(state, stamp, owner, value_bytes, entry), used_ns


def decode_stamp(data: bytes) -> tuple[int, int]:
    """State and stamp of a record's first STAMP_BYTES bytes, unchecked."""
    state, stamp = _STAMP.unpack(data)
    return state, stamp


def encode_used(used_ns: int) -> bytes:
    """What lies at USED_OFFSET."""
    return _USED.pack(used_ns)
