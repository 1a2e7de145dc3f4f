"""A value is a header and a payload; the header says whose page it is and proves that both arrived intact."""

import hashlib
import struct
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from fastcrc import crc32

from hicache.storage.chains import FORMAT_VERSION, NAMESPACE_ID_BYTES, PAGE_ID_BYTES, EntryId, namespace_id, page_id
from hicache.storage.protocol import StorageKey

HEADER_BYTES = 256

_MAGIC = b"hicache\0"
_FIELDS = struct.Struct("<8sII32s32s32s32sQI")
"""magic, version, header bytes, namespace, SHA-256 of the pool's name, page, parent, payload bytes, payload CRC-32C."""
_CHECKSUM = struct.Struct("<I")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size


class Verdict(Enum):
    """What a header and its payload turned out to be."""

    GOOD = "good"
    FOREIGN = "no hicache page, or of another version"
    OTHER = "a page of another namespace, pool, key or size"
    CORRUPT = "checksum mismatch"


@dataclass(frozen=True, slots=True)
class HeaderInfo:
    """What an intact header says, for tools that look at a store without knowing its keys."""

    namespace: bytes
    pool_digest: bytes
    page: bytes
    parent: bytes
    payload_bytes: int
    payload_crc: int


def checksum(data: bytes | bytearray | memoryview) -> int:
    """CRC-32C (Castagnoli)."""
    return crc32.iscsi(data)


def encode_header(key: StorageKey, payload: memoryview) -> bytes:
    """The 256 bytes that go before `payload`; reads all of it once for its checksum."""
    fields = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        key.namespace,
        pool_digest(key.pool),
        key.page,
        key.parent,
        payload.nbytes,
        checksum(payload),
    )
    body = fields.ljust(_CHECKED_BYTES, b"\0")
    return body + _CHECKSUM.pack(checksum(body))


def check(key: StorageKey, header: memoryview, payload: memoryview) -> Verdict:
    """Whether header and payload are, intact, the page that `key` names."""
    if header[:8] != _MAGIC or header[8:12] != FORMAT_VERSION.to_bytes(4, "little"):
        return Verdict.FOREIGN
    info = decode_header(header)
    if info is None:
        return Verdict.CORRUPT
    named = (info.namespace, info.pool_digest, info.page, info.parent, info.payload_bytes)
    if named != (key.namespace, pool_digest(key.pool), key.page, key.parent, payload.nbytes):
        return Verdict.OTHER
    return Verdict.GOOD if checksum(payload) == info.payload_crc else Verdict.CORRUPT


def check_value(entry: EntryId, value: memoryview) -> Verdict:
    """Whether a value, header first, is intact and the page that an entry is about; its pool's name is not known."""
    if value.nbytes < HEADER_BYTES or value[:8] != _MAGIC:
        return Verdict.FOREIGN
    info = decode_header(value[:HEADER_BYTES])
    if info is None:
        return Verdict.CORRUPT
    ids = (page_id(info.namespace, info.page), page_id(info.namespace, info.parent), namespace_id(info.namespace))
    named = (entry[:PAGE_ID_BYTES], entry[PAGE_ID_BYTES : 2 * PAGE_ID_BYTES], entry[-NAMESPACE_ID_BYTES:])
    if ids != named or info.payload_bytes != value.nbytes - HEADER_BYTES:
        return Verdict.OTHER
    return Verdict.GOOD if checksum(value[HEADER_BYTES:]) == info.payload_crc else Verdict.CORRUPT


def decode_header(header: memoryview) -> HeaderInfo | None:
    """What the header says; None if it is not an intact header of this version."""
    if header.nbytes != HEADER_BYTES:
        return None
    if _CHECKSUM.unpack_from(header, _CHECKED_BYTES)[0] != checksum(header[:_CHECKED_BYTES]):
        return None
    magic, version, size, namespace, pool, page, parent, payload_bytes, payload_crc = _FIELDS.unpack_from(header)
    if (magic, version, size) != (_MAGIC, FORMAT_VERSION, HEADER_BYTES):
        return None
    return HeaderInfo(namespace, pool, page, parent, payload_bytes, payload_crc)


@lru_cache(maxsize=64)
def pool_digest(pool: str) -> bytes:
    """SHA-256 of a pool's name: a header has one size however long the name is."""
    return hashlib.sha256(pool.encode("utf-8", "surrogatepass")).digest()
