"""Tokens become little-endian uint32 bytes, or an error that says what to give."""

import array

import numpy as np
import pytest

from hicache.cache.tokens import token_bytes
from hicache.errors import ConfigError

RIGHT = (1).to_bytes(4, "little") + (2**32 - 1).to_bytes(4, "little")
IDS = [1, 2**32 - 1]


@pytest.mark.parametrize(
    "tokens",
    [
        RIGHT,
        bytearray(RIGHT),
        memoryview(RIGHT),
        IDS,
        tuple(IDS),
        np.array(IDS, "<u4"),
        np.array(IDS, ">u4"),
        np.array(IDS, np.int64),
        np.array([1, 0, 2**32 - 1], np.uint64)[::2],
        np.array(IDS, np.int64).data,
        np.array(IDS, np.uint32).data,
        array.array("q", IDS),
    ],
)
def test_every_form_of_the_same_tokens_is_the_same(tokens):
    assert token_bytes(tokens) == RIGHT


@pytest.mark.parametrize("tokens", [b"", [], (), np.empty(0, np.int64)])
def test_no_tokens(tokens):
    assert token_bytes(tokens) == b""


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (b"12345", "5 bytes of tokens; give little-endian uint32, 4 bytes each"),
        ([-1, 3], "token ids from -1 to 3; ids are 0 to 4294967295"),
        ([2**32], "token ids from 4294967296 to 4294967296"),
        ([2**70], "one row of integers"),
        ([1.0], "dtype float64; give one row of integers"),
        ([True], "dtype bool"),
        ([[1, 2]], r"shape \(1, 2\)"),
        ([[1], [2, 3]], "one row of integers"),
        ("12", "one row of integers"),
    ],
)
def test_anything_else_is_refused(tokens, message):
    with pytest.raises(ConfigError, match=message):
        token_bytes(tokens)
