"""The server over stores that run elsewhere: warm after a restart, and on its feet while the store is not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.tiny import write_checkpoint
from tests.server.stored import check_death_and_return, check_outage, check_restart, given
from tests.storage.engines import ValkeyServer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path / "valkey")
    yield server
    server.kill()


def test_valkey(checkpoint: Path, tmp_path: Path, valkey: ValkeyServer):
    config = given(checkpoint, tmp_path, f"valkey://127.0.0.1:{valkey.port}/0?timeout=2")
    check_outage(config, valkey, check_restart(config))


def test_valkey_dies_and_comes_back(checkpoint: Path, tmp_path: Path, valkey: ValkeyServer):
    check_death_and_return(given(checkpoint, tmp_path, f"valkey://127.0.0.1:{valkey.port}/0?timeout=2"), valkey)


@pytest.mark.full
def test_s3(checkpoint: Path, tmp_path: Path):
    pytest.importorskip("obstore", reason="the s3 store is not installed: pip install 'hicache[s3]'")
    from tests.storage.s3.seaweed import SeaweedServer

    server = SeaweedServer(tmp_path / "s3")
    check_restart(given(checkpoint, tmp_path, server.url("served") + "&timeout=10"))
    server.kill()


def test_nixl(checkpoint: Path, tmp_path: Path):
    pytest.importorskip("nixl_cu12", reason="the nixl-posix store is not installed: pip install --no-deps nixl-cu12")
    check_restart(given(checkpoint, tmp_path, f"nixl-posix:{tmp_path}/store"))
