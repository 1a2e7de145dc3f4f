"""What a rank tells the others in one step is one frame of fixed size: what does not fit waits for the next step."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag

import numpy as np

from hicache.errors import RankError
from hicache.transfer.messages import Completion
from hicache.units import BoolArray, PoolName

FRAME_BYTES = 8192

_HEADER = struct.Struct("<4sHHQd3II")
"""magic, ranks, rank, step, seconds, a checksum per subject, bytes of reports."""
_REPORT = struct.Struct("<QB")
"""id, flags."""
_MASK = struct.Struct("<BI")
"""bytes of the pool's name, pages."""
_MAGIC = b"hcr1"

HEADER_BYTES = _HEADER.size
REPORT_BYTES = _REPORT.size


class _Flag(IntFlag):
    MASKED = 1
    """Bitmaps follow: not all pages are right."""
    LATE = 2
    FAILED = 4
    """No page is right."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a transfer ended on one rank. `masks`: per pool which pages are right; None: all are. `failed`: none is."""

    id: int
    masks: Mapping[PoolName, BoolArray] | None
    late: bool
    failed: bool

    def narrow(self, good: Mapping[PoolName, BoolArray]) -> dict[PoolName, BoolArray]:
        """What is right on this rank too. Raises RankError when a bitmap has another length."""
        if self.failed:
            return {}
        if self.masks is None:
            return dict(good)
        narrowed = {}
        for pool, pages in good.items():
            mask = self.masks.get(pool)
            if mask is None:
                continue
            if len(mask) != len(pages):
                raise RankError(
                    f"transfer {self.id}: {len(pages)} pages of pool {pool!r} on one rank, {len(mask)} on another"
                )
            narrowed[pool] = pages & mask
        return narrowed


@dataclass(frozen=True, slots=True)
class Frame:
    """One rank in one step. `sums`: a checksum per subject, in the order of `Subject`."""

    ranks: int
    rank: int
    step: int
    now_s: float
    sums: tuple[int, int, int]
    reports: tuple[Report, ...] = ()


def encode_report(completion: Completion) -> bytes:
    """The bytes of a report of what this rank has seen."""
    late = _Flag.LATE if completion.late else _Flag(0)
    if completion.error is not None and not completion.good:
        return _REPORT.pack(completion.id, late | _Flag.FAILED)
    if all(pages.all() for pages in completion.good.values()):
        return _REPORT.pack(completion.id, late)
    parts = [_REPORT.pack(completion.id, late | _Flag.MASKED), bytes([len(completion.good)])]
    for pool, pages in completion.good.items():
        name = pool.encode()
        parts += [_MASK.pack(len(name), len(pages)), name, np.packbits(pages).tobytes()]
    return b"".join(parts)


def encode_failed(completion: Completion) -> bytes:
    """The bytes of a report that says that no page is right: what is said of a report that no frame can hold."""
    return _REPORT.pack(completion.id, _Flag.FAILED | (_Flag.LATE if completion.late else _Flag(0)))


def encode_frame(frame: Frame, reports: bytes, frame_bytes: int) -> bytes:
    """A frame of `frame_bytes` bytes with `reports`, which fit."""
    head = _HEADER.pack(_MAGIC, frame.ranks, frame.rank, frame.step, frame.now_s, *frame.sums, len(reports))
    return (head + reports).ljust(frame_bytes, b"\0")


def decode_frame(data: bytes) -> Frame:
    """The frame that another rank sent. Raises RankError when it is none."""
    magic, ranks, rank, step, now_s, *sums, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or HEADER_BYTES + length > len(data):
        raise RankError("what a rank sent is no frame of this version of hicache; run the same version on every rank")
    reports, at, end = [], HEADER_BYTES, HEADER_BYTES + length
    while at < end:
        report, at = _decode_report(data, at)
        reports.append(report)
    return Frame(ranks, rank, step, now_s, (sums[0], sums[1], sums[2]), tuple(reports))


def _decode_report(data: bytes, at: int) -> tuple[Report, int]:
    number, bits = _REPORT.unpack_from(data, at)
    flags, at = _Flag(bits), at + _REPORT.size
    masks = None
    if _Flag.MASKED in flags:
        count, at, masks = data[at], at + 1, {}
        for _ in range(count):
            name_bytes, pages = _MASK.unpack_from(data, at)
            at += _MASK.size
            name, at = data[at : at + name_bytes].decode(), at + name_bytes
            packed = np.frombuffer(data, np.uint8, -(-pages // 8), at)
            masks[name] = np.unpackbits(packed, count=pages).astype(np.bool_)
            at += len(packed)
    return Report(number, masks, _Flag.LATE in flags, _Flag.FAILED in flags), at
