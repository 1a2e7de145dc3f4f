"""`hicache serve` on bare connections: whatever comes over the wire, in whatever pieces, others are answered."""

import json
import random
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import httpx
import pytest

from tests.engine.tiny import write_checkpoint
from tests.server.fake_engine import wait_until
from tests.server.served import Served, served
from tests.server.stress import connect, reset_at_close

SIZES = ("--device-size", "4MiB", "--host-size", "8MiB")
BODY = {"model": "tiny", "prompt": "over the wire", "max_tokens": 4, "ignore_eos": True, "temperature": 0.0}
SPARE_FILES = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("edges")
    with served(str(write_checkpoint(home / "tiny")), *SIZES, home=home) as one:
        yield one
        assert "Traceback" not in "\n".join(one.stop())


@pytest.fixture(scope="module")
def text(server: Served) -> str:
    """What answers `BODY`."""
    return str(httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"])


@pytest.fixture(autouse=True)
def others_are_answered(server: Served, text: str) -> Iterator[None]:
    """After each test: the same answer as ever, and every connection is gone."""
    files = server.footprint().files
    yield
    assert answer(server, text)
    wait_until(lambda: server.footprint().files <= files + SPARE_FILES, 60)
    server.rest()


def answer(server: Served, text: str) -> bool:
    got = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
    return got.status_code == 200 and got.json()["choices"][0]["text"] == text


def opened(server: Served) -> socket.socket:
    return connect(httpx.URL(server.url))


def request(body: bytes, version: str = "1.1", *headers: str) -> bytes:
    lines = (f"POST /v1/completions HTTP/{version}", "Host: here", "Content-Type: application/json", *headers)
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body


def all_of(client: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def encoded(**more: object) -> bytes:
    return json.dumps(BODY | more).encode()


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_its_answer_and_the_end_of_the_connection(server: Served, text: str, stream: bool):
    with opened(server) as client:
        client.sendall(request(encoded(stream=stream), "1.0"))
        head, _, body = all_of(client).partition(b"\r\n\r\n")
    assert head.split()[1] == b"200"
    assert b"chunked" not in head.lower()
    if not stream:
        assert json.loads(body)["choices"][0]["text"] == text
        return
    *events, last = [line.removeprefix(b"data: ") for line in body.splitlines() if line]
    assert last == b"[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text


def test_pipelined_requests_are_answered_in_their_order(server: Served, text: str):
    bad = request(encoded(max_tokens=0))
    with opened(server) as client:
        client.sendall(request(encoded()) + bad + request(encoded(), "1.1", "Connection: close"))
        got = all_of(client)
    assert re.findall(rb"HTTP/1\.1 (\d+) ", got) == [b"200", b"400", b"200"]
    assert got.count(json.dumps(text, ensure_ascii=False).encode()) == 2


def test_a_pipelined_request_after_one_that_is_given_up_does_no_harm(server: Served):
    with opened(server) as client:
        client.sendall(request(encoded(stream=True, max_tokens=500)) * 3)
        client.recv(1)
        reset_at_close(client)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_without_end_is_told_and_cut_off(server: Served, chunked: bool):
    block = b"x" * (1 << 20)
    piece = b"%x\r\n%s\r\n" % (len(block), block) if chunked else block
    size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {1 << 40}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n{size}\r\n\r\n"
    before = server.footprint().resident_bytes
    with opened(server) as client:
        client.sendall(head.encode())
        sent = 0
        try:
            while sent < 256:
                client.sendall(piece)
                sent += 1
            got = b""
        except (BrokenPipeError, ConnectionResetError):
            got = told_before_the_reset(client)
    assert 32 <= sent < 256, "it reads up to its limit, and not for ever"
    assert got == b"" or got.split()[1] == b"413"
    assert server.footprint().resident_bytes - before < 192 << 20


def told_before_the_reset(client: socket.socket) -> bytes:
    """The answer, where it came before the reset: a reset may throw away what has arrived."""
    try:
        return client.recv(1 << 16)
    except ConnectionResetError:
        return b""


def test_slow_clients_keep_nobody_waiting(server: Served, text: str):
    whole = request(encoded())
    with ExitStack() as stack:
        slow = [stack.enter_context(opened(server)) for _ in range(30)]
        for position in range(40):
            for client in slow:
                client.sendall(whole[position : position + 1])
            assert position % 8 or answer(server, text)
        slow[0].sendall(whole[40:])
        assert slow[0].recv(1 << 16).split()[1] == b"200"


def test_fifty_connections_that_vanish_at_once(server: Served, text: str):
    whole = request(encoded(stream=True, max_tokens=200))
    rng = random.Random(5)
    clients = [opened(server) for _ in range(50)]
    for client in clients:
        client.sendall(whole[: rng.choice((0, 1, 40, len(whole) - 5, len(whole)))])
    assert answer(server, text)
    for client in clients:
        if rng.random() < 0.5:
            reset_at_close(client)
        client.close()


def test_random_bytes_are_refused_or_cut_off(server: Served):
    """A valid request, damaged at random: the answer is one of HTTP, or there is none."""
    rng = random.Random(7)
    for _ in range(150):
        damaged = bytearray(request(encoded(max_tokens=1), "1.1", "Connection: close"))
        for _ in range(rng.choice((1, 3, 20))):
            start = rng.randrange(len(damaged))
            damaged[start : start + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
        with closing(opened(server)) as client:
            client.sendall(damaged)
            client.shutdown(socket.SHUT_WR)
            got = all_of(client)
        assert not got or got.split()[1] in {b"200", b"400", b"404", b"405", b"413"}, (bytes(damaged), got)


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: here\r\nX: " + b"y" * (1 << 20) + b"\r\n\r\n",
    ],
    ids=["tls", "negative", "two-lengths", "long-header"],
)
def test_a_head_that_is_no_head_is_refused_at_once(server: Served, head: bytes):
    with opened(server) as client:
        try:
            client.sendall(head + b"\r\n\r\n")
            got = all_of(client)
        except (BrokenPipeError, ConnectionResetError):
            return
    assert got.split()[1] == b"400"
