from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hicache.engine import Engine
from hicache.engine.model import CausalModel, load_model
from tests.engine.tiny import running, settings, write_checkpoint


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny products are quicker on one thread, and the machine has other work."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny-llama")


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def engine(checkpoint: Path, cache_folder: Path) -> Iterator[Engine]:
    """A fresh engine over the tiny model."""
    with running(settings(checkpoint, cache_folder)) as started:
        yield started


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> CausalModel:
    """The tiny model alone."""
    return load_model(checkpoint, torch.float32)
