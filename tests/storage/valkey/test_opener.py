"""What a Valkey or Redis URL means, and what is said about one that is wrong; TLS."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache.storage import open_store
from hicache.storage.registry import parse_location
from hicache.storage.valkey import opener
from hicache.storage.valkey.servers import Cluster, SingleServer
from hicache.storage.valkey.wire import Address
from hicache.testing.storage import get, put, sample_chain
from tests.storage.engines import ValkeyServer
from tests.storage.proxy import Relay


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("valkey:", "'' is no server; write for instance valkey://127.0.0.1:6379/0"),
        ("valkey://h:0", "'h:0' is no server"),
        ("valkey://h:65536", "is no server"),
        ("redis://h:x/0", "is no server"),
        ("valkey://h/x", "'x' is no database"),
        ("valkey://h/-1", "is no database"),
        ("valkey://h,i", "add cluster=yes"),
        ("valkey://h?cluster=maybe", "cluster='maybe': say yes or no"),
        ("valkey://h/1?cluster=yes", "a cluster has only database 0"),
        ("valkey://h?timeout=0", "timeout='0': give seconds"),
        ("valkey://h?timeout=nan", "timeout='nan': give seconds"),
        ("valkey://h?timeout=x", "timeout='x': give seconds"),
        ("valkey://h?ttl=0", "ttl='0': give a whole number from 1"),
        ("valkey://h?ttl=1.5", "give a whole number"),
        ("valkey://h?cap=1GiB", "no option 'cap'"),
        ("valkey://h?ca=x", "option 'ca' is for valkeys:"),
        ("valkeys://h?ca=/nowhere", "ca can't be used"),
        ("valkey://h?password_env=NOT_SET_ANYWHERE", "no variable 'NOT_SET_ANYWHERE'"),
        ("valkey://:a@h?password_env=HOME", "leave one out"),
        ("valkey://:sesame@h#x", "write it as %23"),
    ],
)
def test_a_wrong_url(url: str, message: str):
    with pytest.raises(ConfigError) as refusal:
        open_store(url)
    assert message in str(refusal.value)
    assert "sesame" not in str(refusal.value)


def test_addresses(monkeypatch):
    seen = []

    def remember(kind):
        def make(where, login):
            seen.append((kind, where, login))
            raise InterruptedError

        return make

    monkeypatch.setattr(opener, "SingleServer", remember(SingleServer))
    monkeypatch.setattr(opener, "Cluster", remember(Cluster))
    for url in (
        "valkey://h",
        "redis://[::1]:7/3",
        "valkey://u:p%2Fq%40@h:1/2",
        "valkey://h:1,i:2?cluster=yes",
        "rediss://h?user=u&password=p",
    ):
        with pytest.raises(InterruptedError):
            opener.open_valkey(parse_location(url, {}))
    assert [where for _, where, _ in seen] == [
        Address("h", 6379),
        Address("::1", 7),
        Address("h", 1),
        [Address("h", 1), Address("i", 2)],
        Address("h", 6379),
    ]
    logins = [login for *_, login in seen]
    assert [login.database for login in logins] == [0, 3, 2, 0, 0]
    assert [(login.user, login.password) for login in logins] == [("", "")] * 2 + [("u", "p/q@"), ("", ""), ("u", "p")]
    assert [login.tls is not None for login in logins] == [False] * 4 + [True]
    assert "p/q@" not in repr(logins[2])


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself, and its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    path = tmp_path / "both.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    where = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "-", "-out", "-"]
    path.write_bytes(subprocess.run([*command, *where], check=True, capture_output=True).stdout)
    return path


def test_tls(tmp_path: Path, certificate: Path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = ValkeyServer(tmp_path)
    relay = Relay(server.port, context)
    [key] = sample_chain(1)
    store = open_store(f"rediss://127.0.0.1:{relay.port}?ca={certificate}")
    value = bytes(range(256)) * 8000
    assert put(store, key, value)
    assert get(store, key, len(value)) == value
    store.close()
    stranger = open_store(f"valkeys://127.0.0.1:{relay.port}")
    assert "certificate verify failed" in stranger.health()[0]
    assert not put(stranger, key, value)
    stranger.close()
    relay.close()
    server.kill()
