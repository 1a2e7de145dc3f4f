"""Whatever a server sends, a connection returns an answer of the protocol or is broken."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.storage.protocol import Buffers
from hicache.storage.remote import Deadline
from hicache.storage.valkey.servers import key_slot
from hicache.storage.valkey.wire import Address, Connection, Filled, Login, OtherSize, Refusal, Reply, pack


def answer(sent: Sequence[bytes], into: Buffers | None = None, timeout_s: float = 10.0, stays_s: float = 0.0) -> Reply:
    """What a connection makes of these pieces of bytes, after which the server stays for a while and hangs up."""
    heard = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                for piece in sent:
                    client.sendall(piece)
                heard.wait(stays_s)

        thread = threading.Thread(target=serve)
        thread.start()
        deadline = Deadline(timeout_s)
        connection = Connection(Address("127.0.0.1", listener.getsockname()[1]), Login("", "", 0, None), deadline)
        try:
            return connection.receive(deadline, into)
        finally:
            heard.set()
            connection.close()
            thread.join()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"+OK\r\n", b"OK"),
        (b":7\r\n", 7),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"$3\r\na\r\n\r\n", b"a\r\n"),
        (b"*2\r\n:1\r\n*1\r\n$1\r\nx\r\n", [1, [b"x"]]),
        (b"-MOVED 3 h:1\r\n", Refusal("MOVED 3 h:1")),
    ],
)
def test_answers(sent: bytes, expected: Reply):
    assert answer([sent]) == expected
    assert answer([sent[i : i + 1] for i in range(len(sent))]) == expected


@pytest.mark.parametrize(
    "sent",
    [b"", b"+OK", b"HTTP/1.1 400 Bad\r\n", b":x\r\n", b"$x\r\n", b"$3\r\nabcde", b"$99999999999\r\n", b"$5\r\nabc"],
)
def test_what_is_no_answer_breaks_the_connection(sent: bytes):
    with pytest.raises(OSError):
        answer([sent])


@pytest.mark.parametrize("sent", [b"", b"$20", b"$20000\r\n" + b"x" * 5000, b"$20\r\nab", b"*2\r\n:1\r\n"])
def test_a_server_that_stops_in_the_middle_is_left_in_time(sent: bytes):
    with pytest.raises(TimeoutError):
        answer([sent], [memoryview(bytearray(20_000))] if b"20000" in sent else None, timeout_s=0.2, stays_s=5.0)


def test_arrays_without_end_break_the_connection():
    with pytest.raises(OSError):
        answer([b"*1\r\n" * 10_000])
    with pytest.raises(OSError, match="a line without end"):
        answer([b"+" + b"x" * 1_000_000])


@given(st.binary(max_size=60))
def test_noise(sent: bytes):
    with contextlib.suppress(OSError):
        answer([sent])


@given(st.binary(max_size=20_000), st.lists(st.integers(0, 20_000), max_size=4), st.integers(1, 20_000))
def test_a_value_fills_its_parts(value: bytes, cuts: list[int], piece: int):
    bounds = [0, *sorted(min(cut, len(value)) for cut in cuts), len(value)]
    buffer = bytearray(len(value))
    parts = [memoryview(buffer)[a:b] for a, b in itertools.pairwise(bounds)]
    sent = b"$%d\r\n%s\r\n" % (len(value), value)
    assert answer([sent[i : i + piece] for i in range(0, len(sent), piece)], parts) == Filled()
    assert buffer == value


def test_a_value_of_another_size_is_passed_over():
    assert answer([b"$5\r\nabcde\r\n"], [memoryview(bytearray(4))]) == OtherSize(5)
    assert answer([b"$200000\r\n" + b"x" * 200_000 + b"\r\n"], [memoryview(bytearray(4))]) == OtherSize(200_000)


def test_large_parts_are_not_copied():
    small, large = memoryview(b"h" * 10), memoryview(bytearray(5000))
    pieces = pack(b"SET", b"k", [small, large])
    assert b"".join(pieces) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5010\r\n" + small + large + b"\r\n"
    assert [piece for piece in pieces if isinstance(piece, memoryview) and piece.obj is large.obj]


def test_slots():
    # Example of the cluster specification.
    assert key_slot(b"123456789") == 0x31C3
