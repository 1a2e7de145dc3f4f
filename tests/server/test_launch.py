"""`hicache serve` as a process: it takes its address first, says where it is, and ends with status 0 when asked to."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from hicache.config import ServeConfig
from hicache.errors import ConfigError
from hicache.server.launch import listen, reached_at, take_address
from tests.engine.tiny import write_checkpoint

FLAGS = ("--port", "0", "--threads", "1", "--device-size", "4MiB", "--host-size", "8MiB")


@contextmanager
def process(*arguments: str, home: Path) -> Iterator[subprocess.Popen[str]]:
    """`hicache serve` in a process of its own."""
    command = [sys.executable, "-m", "hicache", "serve", *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def lines_until_ready(started: subprocess.Popen[str]) -> list[str]:
    assert started.stderr is not None
    lines: list[str] = []
    for line in started.stderr:
        lines.append(line.rstrip())
        if "authentication" in line or "this machine only" in line:
            break
    return lines


def test_serves_until_sigterm_and_then_closes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    with process(str(folder), *FLAGS, "--storage-url", f"file:{tmp_path / 'store'}", home=tmp_path) as started:
        said = "\n".join(lines_until_ready(started))
        found = re.search(r"ready at (http://127\.0\.0\.1:\d+)/v1", said)
        assert found is not None, said
        assert "device kv" in said and "host kv" in said and f"file:{tmp_path / 'store'}" in said
        body = {"model": "tiny", "prompt": "hello " * 20, "max_tokens": 1500, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{found[1]}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            started.send_signal(signal.SIGTERM)
            # An answer that takes longer than the grace ends with an error event, and then as any other.
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert started.wait(60) == 0
        assert started.stderr is not None
        assert "Traceback" not in started.stderr.read()


def test_address_that_is_taken_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}: .*--port"):
            take_address(ServeConfig(port=port))


def test_two_servers_that_start_at_once_do_not_both_get_the_address() -> None:
    with take_address(ServeConfig(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}: .*--port"):
            take_address(ServeConfig(port=port))


def test_clients_can_connect_once_it_listens() -> None:
    serve = ServeConfig(port=0)
    with take_address(serve) as listener:
        address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError), socket.create_connection(address, timeout=5):
            pass
        listen(listener, serve)
        with socket.create_connection(address, timeout=5):
            pass


def test_address_that_another_took_while_the_model_was_loaded_is_told_in_one_line() -> None:
    with socket.socket() as other, socket.socket() as listener:
        for one in (other, listener):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0 if one is other else other.getsockname()[1]))
        other.listen()
        with pytest.raises(ConfigError, match=r"port=1: .*--port"):
            listen(listener, ServeConfig(port=1))


def test_address_can_be_had_again_while_old_connections_linger() -> None:
    serve = ServeConfig(port=0)
    with take_address(serve) as listener:
        port = listener.getsockname()[1]
        listen(listener, serve)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            accepted, _ = listener.accept()
            accepted.close()  # closed here first: this side lingers
            assert client.recv(1) == b""
    take_address(ServeConfig(port=port)).close()


def test_host_that_does_not_exist_is_told_in_one_line() -> None:
    with pytest.raises(ConfigError, match="host="):
        take_address(ServeConfig(host="no.such.host.invalid"))


@pytest.mark.parametrize(
    ("host", "url", "who"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/v1", "this machine only"),
        ("::1", "http://[::1]:80/v1", "this machine only"),
        ("0.0.0.0", "http://0.0.0.0:80/v1", "without authentication"),
    ],
)
def test_says_who_can_reach_it(host: str, url: str, who: str) -> None:
    said = "\n".join(reached_at(host, 80))
    assert url in said
    assert who in said
