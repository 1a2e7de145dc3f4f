"""A frame says what a rank has seen, all of it, in a fixed number of bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.controller.frames import (
    FRAME_BYTES,
    HEADER_BYTES,
    Frame,
    Report,
    decode_frame,
    encode_failed,
    encode_frame,
    encode_report,
)
from hicache.errors import RankError
from hicache.transfer import Completion

BITMAPS = st.lists(st.booleans(), max_size=40).map(lambda bits: np.array(bits, dtype=np.bool_))
COMPLETIONS = st.builds(
    Completion,
    st.integers(0, 2**63),
    st.dictionaries(st.sampled_from(["kv", "swa", "state", "zustände"]), BITMAPS, max_size=4),
    st.none(),
    st.booleans(),
)


def sent(*reports: bytes, frame_bytes: int = FRAME_BYTES) -> tuple[Report, ...]:
    data = encode_frame(Frame(2, 1, 7, 1.5, (1, 2, 3)), b"".join(reports), frame_bytes)
    assert len(data) == frame_bytes
    frame = decode_frame(data)
    assert (frame.ranks, frame.rank, frame.step, frame.now_s, frame.sums) == (2, 1, 7, 1.5, (1, 2, 3))
    return frame.reports


@given(st.lists(COMPLETIONS, max_size=5))
def test_what_arrives_narrows_as_what_was_seen(completions: list[Completion]):
    reports = sent(*[encode_report(one) for one in completions])
    assert [(one.id, one.late) for one in reports] == [(one.id, one.late) for one in completions]
    for report, seen in zip(reports, completions, strict=True):
        everything = {pool: np.ones(len(pages), dtype=np.bool_) for pool, pages in seen.good.items()}
        narrowed = report.narrow(everything)
        assert list(narrowed) == list(seen.good)
        assert all(np.array_equal(narrowed[pool], seen.good[pool]) for pool in narrowed)


def test_a_failure_leaves_nothing_right():
    good = {"kv": np.ones(3, dtype=np.bool_)}
    failed, told = sent(encode_report(Completion(1, error="EIO")), encode_failed(Completion(2, good, late=True)))
    assert failed.narrow(good) == told.narrow(good) == {}
    assert (failed.late, told.late) == (False, True)


def test_a_pool_that_one_rank_has_nothing_of_is_right_nowhere():
    bad = {"kv": np.array([True, False])}
    (report,) = sent(encode_report(Completion(1, bad)))
    assert list(report.narrow({"kv": np.ones(2, np.bool_), "swa": np.ones(2, np.bool_)})) == ["kv"]


def test_bitmaps_of_other_lengths_are_a_named_error():
    (report,) = sent(encode_report(Completion(1, {"kv": np.array([True, False])})))
    with pytest.raises(RankError, match="transfer 1: 3 pages of pool 'kv' on one rank, 2 on another"):
        report.narrow({"kv": np.ones(3, dtype=np.bool_)})


@pytest.mark.parametrize("data", [b"\0" * FRAME_BYTES, b"hcr1" + b"\xff" * (FRAME_BYTES - 4)])
def test_what_is_no_frame_is_a_named_error(data: bytes):
    with pytest.raises(RankError, match="same version"):
        decode_frame(data)


def test_reports_fill_a_frame_to_its_last_byte():
    report = encode_report(Completion(5))
    assert len(sent(report, report, frame_bytes=HEADER_BYTES + 2 * len(report))) == 2
