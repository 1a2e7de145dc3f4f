"""`hicache demo`: four rows that are told apart by where the pages came from; with --json nothing else on stdout."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache.cli import demo
from hicache.cli.demo_rows import Answer
from hicache.cli.demo_text import QUESTIONS
from hicache.config import CacheConfig, ServeConfig, Settings
from tests.engine.tiny import write_checkpoint

PROMPT_TOKENS = 325


def answer(tier: str, text: str = "Yes.", tokens: Sequence[int] = (7, 8)) -> Answer:
    cached = {"device": 0, "host": 0, "storage": 0}
    if tier in cached:
        cached[tier] = 320
    return Answer(PROMPT_TOKENS, cached, 0.5, tuple(tokens), text)


def told(monkeypatch: pytest.MonkeyPatch, storage: Answer) -> None:
    """Let the demo run with answers that are made up."""
    here = [answer("cold"), answer("device"), *[answer("device", text) for text in ("Two.", "Three.")], answer("host")]
    monkeypatch.setattr(demo, "_in_this_process", lambda settings: here)
    monkeypatch.setattr(demo, "_in_new_process", lambda settings, question: storage)


def test_whole_demo_on_a_tiny_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "tiny", max_position_embeddings=16384)
    settings = Settings(
        cache=CacheConfig(device_size=64 << 20, host_size=64 << 20, page_size=64),
        serve=ServeConfig(model=str(folder), cache_folder=tmp_path, threads=1),
    )
    assert demo.run_demo(settings, True) == 0
    printed = json.loads(capfd.readouterr().out)
    assert set(printed) == {"rows"}
    assert [row["case"] for row in printed["rows"]] == ["cold", "device", "host", "storage"]
    prompt_tokens = printed["rows"][0]["prompt_tokens"]
    full = prompt_tokens // 64 * 64
    assert full > 7000
    for row in printed["rows"]:
        expected = {"device": 0, "host": 0, "storage": 0} | ({row["case"]: full} if row["case"] != "cold" else {})
        assert row["prompt_tokens"] == prompt_tokens
        assert row["cached_tokens"] == expected
        assert row["same_tokens"] is True
        assert row["ttft_s"] > 0


def test_people_see_answers_table_and_how_to_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, answer("storage"))
    assert demo.run_demo(Settings(serve=ServeConfig(model="org/model", cache_folder=tmp_path)), False) == 0
    said = capsys.readouterr().out
    for question in QUESTIONS:
        assert question in said
    assert said.index("Yes.") < said.index("Two.") < said.index("Three.") < said.index("storage")
    assert f"hicache serve org/model --storage-url file:{tmp_path}/demo/run-" in said


def test_store_is_the_demos_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, answer("storage"))
    settings = Settings(cache=CacheConfig(storage_url="file:/mine"), serve=ServeConfig(cache_folder=tmp_path))
    assert demo.run_demo(settings, False) == 0
    printed = capsys.readouterr()
    assert "/mine" not in printed.out
    assert "storage_url is left alone" in printed.err


@pytest.mark.parametrize(
    ("storage", "reason"), [(answer("none"), "storage: 0 of 320"), (answer("storage", tokens=(7, 9)), "tokens differ")]
)
def test_run_that_falls_short_fails(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    storage: Answer,
    reason: str,
) -> None:
    told(monkeypatch, storage)
    assert demo.run_demo(Settings(serve=ServeConfig(cache_folder=tmp_path)), True) == 1
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["rows"]) == 4
    assert reason in printed.err
