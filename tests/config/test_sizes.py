import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.config import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("1KiB", 1024),
        ("3TiB", 3 << 40),
        ("65536", 65536),
        ("7B", 7),
        ("0", 0),
        (4096, 4096),
    ],
)
def test_sizes_that_are_plain(text: str | int, nbytes: int):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("50%", "2 g", "2 GiB", " 2GiB", "2GiB ", "2GiB\n", "1e3", "-1", "+1", "1_000", "1.5GiB", "2gib", "2G", "2GB"),
        *("", "GiB", "٣", "0x10", "2GiB2", "nan", "8388608TiB", str(1 << 63)),
        *(True, -1, 1 << 63, 1.0, None, b"1"),
    ],
)
def test_anything_else_is_refused(text: object):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@given(st.integers(0, (1 << 63) - 1))
def test_a_formatted_size_reads_back(nbytes: int):
    assert parse_size(format_size(nbytes)) == nbytes


def test_sizes_are_shown_in_the_largest_unit_that_is_exact():
    assert [format_size(n) for n in (0, 1023, 1024, 1536 << 10, 2 << 30)] == ["0B", "1023B", "1KiB", "1536KiB", "2GiB"]
