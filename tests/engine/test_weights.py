"""Other weights in a running engine: answers are those of a fresh engine over them, and nothing old is found again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hicache.engine import Engine, SamplingParams
from hicache.errors import ConfigError, InUseError
from tests.engine.mtp_checkpoint import write_mtp
from tests.engine.tiny import ask, collect, prompt, running, settings, write_checkpoint

PROMPT = prompt(60)
LONG = 200


def other_weights(folder: Path, to: Path) -> Path:
    """The same checkpoint with every tensor another."""
    shutil.copytree(folder, to)
    source = torch.Generator().manual_seed(11)
    for path in to.glob("*.safetensors"):
        tensors = {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=source) for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
    return to


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("old") / "model")


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_weights(old, tmp_path_factory.mktemp("new") / "model")


def load_beforehand(engine: Engine, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The next exchange takes no time: requests that run before it still run then."""
    weights: Any = engine._weights
    ready = weights.load(str(folder), None)
    patch.setattr(weights, "load", lambda folder, draft: ready)


def answer(folder: Path, cache_folder: Path, **changes: Any) -> list[int]:
    with running(settings(folder, cache_folder, **changes)) as engine:
        return ask(engine, PROMPT)[0]


def cached(engine: Engine) -> int:
    _, last = ask(engine, PROMPT)
    assert last.usage is not None
    return sum(last.usage.cached_tokens.values())


def test_s26_new_weights_answer_and_nothing_old_is_cached_in_any_tier(old: Path, new: Path, tmp_path: Path):
    with running(settings(old, tmp_path, storage_url=f"file:{tmp_path}/store")) as engine:
        before, _ = ask(engine, PROMPT)
        assert cached(engine) > 0
        namespace = engine.info.namespace
        flushed = engine.update_weights(str(new))
        assert min(flushed.device.pages, flushed.host.pages, flushed.storage.pages) > 0
        assert engine.info.namespace.weights != namespace.weights
        after, last = ask(engine, PROMPT)
        assert last.usage is not None
        assert dict(last.usage.cached_tokens) == {"device": 0, "host": 0, "storage": 0}
        assert after == answer(new, tmp_path) != before
        assert cached(engine) > 0
        engine.update_weights(str(old))
        assert ask(engine, PROMPT)[0] == before
        engine.audit()


def test_weights_are_not_exchanged_under_a_request_unless_forced(
    old: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Forced: it goes on from what it has answered, on the new weights alone."""
    with running(settings(old, tmp_path)) as engine:
        load_beforehand(engine, new, monkeypatch)
        streams = [engine.submit(PROMPT, SamplingParams(max_tokens=LONG, ignore_eos=True)) for _ in range(2)]
        first = next(iter(streams[0]))
        with pytest.raises(InUseError, match="requests run on the weights"):
            engine.update_weights(str(new))
        engine.update_weights(str(new), force=True)
        answers = [collect(stream)[0] for stream in streams]
        tokens = [*first.token_ids, *answers[0]]
        assert len(tokens) == LONG
        assert len(answers[1]) == LONG
        assert engine.audit().open_matches == 0
        assert ask(engine, [*PROMPT, *tokens[:-8]], 8, ignore_eos=True)[0] == tokens[-8:]


def test_a_request_that_waits_is_computed_with_the_new_weights(
    old: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with running(settings(old, tmp_path, max_running=1)) as engine:
        load_beforehand(engine, new, monkeypatch)
        first = engine.submit(PROMPT, SamplingParams(max_tokens=LONG, ignore_eos=True))
        waiting = engine.submit(PROMPT, SamplingParams(max_tokens=8))
        engine.update_weights(str(new), force=True)
        collect(first)
        assert collect(waiting)[0] == answer(new, tmp_path)


@pytest.mark.parametrize("draft", ["first-layers:2", "checkpoint"])
def test_drafters_go_along(old: Path, new: Path, tmp_path: Path, draft: str):
    own = write_checkpoint(tmp_path / "draft", num_hidden_layers=1) if draft == "checkpoint" else None
    newer = other_weights(own, tmp_path / "draft2") if own is not None else None
    with running(settings(old, tmp_path, draft=str(own or draft))) as engine:
        ask(engine, PROMPT)
        engine.update_weights(str(new), draft=None if newer is None else str(newer))
        assert cached(engine) == 0
        assert ask(engine, PROMPT)[0] == answer(new, tmp_path)
        stats = engine.stats().core
        assert stats.drafted_tokens > 0


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(old: Path, tmp_path: Path):
    shape = write_checkpoint(tmp_path / "shape", intermediate_size=128)
    torn = other_weights(old, tmp_path / "torn")
    path = next(torn.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    with running(settings(old, tmp_path)) as engine:
        before, _ = ask(engine, PROMPT)
        for folder, match in (
            (str(shape), "intermediate_size"),
            (str(torn), "torn|safetensors|loaded"),
            (str(tmp_path / "nothing"), "nothing"),
            ("a\0b", "."),
            ("x" * 300, "."),
        ):
            with pytest.raises(ConfigError, match=match):
                engine.update_weights(folder)
        with pytest.raises(ConfigError, match="no checkpoint of its own drafts"):
            engine.update_weights(str(old), draft=str(old))
        assert cached(engine) > 0
        assert ask(engine, PROMPT)[0] == before


def test_mtp_layers_go_along(tmp_path: Path):
    first = write_mtp("deepseek_v3", tmp_path / "first", 3, 1)
    second = other_weights(first, tmp_path / "second")
    mtp = {"draft": "mtp", "device_size": "4MiB", "host_size": "8MiB"}
    with running(settings(first, tmp_path, **mtp)) as engine:
        ask(engine, PROMPT)
        engine.update_weights(str(second))
        assert ask(engine, PROMPT)[0] == answer(second, tmp_path, **mtp)
