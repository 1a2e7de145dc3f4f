"""A size is a whole number of bytes; what is not plainly one is refused, never guessed."""

import re
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

_UNIT_BYTES = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
_SIZE = re.compile(rf"([0-9]+)({'|'.join(_UNIT_BYTES)})?")
_LIMIT_BYTES = 1 << 63


def parse_size(size: object) -> int:
    """Bytes of `2GiB`, `512MiB`, `4096` or a plain int that is not negative. ValueError says what would be right."""
    if isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        nbytes = int(match[1]) * _UNIT_BYTES[match[2] or "B"]
    else:
        raise ValueError("write a size as 2GiB, 512MiB or 65536 (whole numbers; KiB, MiB, GiB, TiB or bytes)")
    if not 0 <= nbytes < _LIMIT_BYTES:
        raise ValueError("a size is from 0 to less than 2^63 bytes")
    return nbytes


def format_size(nbytes: int) -> str:
    """The size in the largest unit that shows it exactly: `parse_size` gives the same number back."""
    for unit, unit_bytes in _UNIT_BYTES.items():
        if nbytes >= unit_bytes and nbytes % unit_bytes == 0:
            return f"{nbytes // unit_bytes}{unit}"
    return f"{nbytes}B"


Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size, when_used="json")]
"""A field of this type takes a size as text or bytes, and holds bytes."""
