"""Stores are attached, detached and switched at random moments while requests run: every answer is the right one."""

import random
from pathlib import Path

import pytest

from hicache.engine import SamplingParams
from hicache.errors import ConfigError, InUseError, StorageError
from tests.engine.tiny import PAGE_BYTES, ask, collect, prompt, running, settings, write_checkpoint

PROMPTS = [prompt(40, seed=1)[: 8 * pages] + prompt(30, seed=2 + pages) for pages in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("seed", range(2))
def test_no_request_fails_and_no_answer_is_wrong_whatever_becomes_of_the_store(folder: Path, tmp_path: Path, seed: int):
    with running(settings(folder, tmp_path)) as engine:
        right = [ask(engine, one)[0] for one in PROMPTS]
    dice = random.Random(seed)
    small = {"device_size": 30 * PAGE_BYTES, "host_size": 40 * PAGE_BYTES}
    with running(settings(folder, tmp_path, max_model_len=100, **small)) as engine:
        for _ in range(12):
            asked = [dice.randrange(len(PROMPTS)) for _ in range(3)]
            streams = [engine.submit(PROMPTS[number], SamplingParams(max_tokens=8)) for number in asked]
            url = f"file:{tmp_path}/store{dice.randrange(2)}"
            action = dice.choice(["attach", "detach", "switch", "flush"])
            try:
                if action == "attach":
                    engine.attach_storage(url)
                elif action == "switch":
                    engine.switch_storage(url)
                elif action == "detach":
                    engine.detach_storage()
                else:
                    engine.flush(force=True)
            except InUseError:
                assert action == "attach"
            for number, stream in zip(asked, streams, strict=True):
                tokens, last = collect(stream)
                assert (tokens, last.error) == (right[number], None)
        assert engine.audit().open_matches == 0
        assert engine.health() == ()


def test_a_store_that_cannot_be_had_leaves_the_one_that_is_there(folder: Path, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with running(settings(folder, tmp_path, storage_url=f"file:{tmp_path}/store")) as engine:
        ask(engine, PROMPTS[0])
        with pytest.raises(InUseError, match="a store is attached"):
            engine.attach_storage(f"file:{tmp_path}/other")
        with pytest.raises(StorageError):
            engine.switch_storage(f"file:{tmp_path}/file")
        with pytest.raises(ConfigError):
            engine.switch_storage("nosuch:x")
        stored = engine.call(lambda core: core.cache.stats().storage)
        assert stored is not None
        assert engine.flush().storage.pages > 0
