"""Token ids come as bytes or arrays and are always little-endian uint32 from here on."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from hicache.errors import ConfigError
from hicache.keys import TOKEN_BYTES

Tokens: TypeAlias = bytes | bytearray | memoryview | Sequence[int] | np.ndarray[Any, np.dtype[Any]]
"""Token ids: little-endian uint32 bytes, an integer array (or a view of one), or ints (slow for long prompts)."""

_MOST = np.iinfo(np.uint32).max


def token_bytes(tokens: Tokens) -> bytes:
    """The ids as little-endian uint32 bytes. Raises ConfigError for what is not a row of ids from 0 to 2**32 - 1."""
    if isinstance(tokens, bytes | bytearray) or (isinstance(tokens, memoryview) and tokens.format == "B"):
        raw = bytes(tokens)
        if len(raw) % TOKEN_BYTES:
            raise ConfigError(f"{len(raw)} bytes of tokens; give little-endian uint32, {TOKEN_BYTES} bytes each")
        return raw
    try:
        ids = np.asarray(tokens)
    except ValueError as error:
        raise ConfigError(f"tokens are not one row of integers: {error}") from error
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "ui":
        raise ConfigError(f"tokens of shape {ids.shape} and dtype {ids.dtype}; give one row of integers")
    if int(ids.min()) < 0 or int(ids.max()) > _MOST:
        raise ConfigError(f"token ids from {ids.min()} to {ids.max()}; ids are 0 to {_MOST}")
    return ids.astype("<u4").tobytes()
