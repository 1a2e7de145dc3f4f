"""A hybrid model served as a user serves it: `hicache serve` with speculation on, asked through the openai client."""

import re
from pathlib import Path

import httpx
import openai
import pytest

from hicache.testing.families import write_tiny
from tests.server.test_launch import lines_until_ready, process

QUESTION = "Tell me again about the house by the river, and who lives in it now. " * 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with attention and recurrent state, and a small draft of the same tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    return write_tiny("qwen3_next", folder / "hybrid"), write_tiny("llama", folder / "draft", seed=1)


def answers(
    folder: Path, store: Path, home: Path, questions: list[str], *flags: str
) -> tuple[list[tuple[str, int]], float]:
    """Text and cached tokens of each question, asked in turn of a server of its own, and how much it guessed ahead."""
    sizes = ("--port", "0", "--threads", "1", "--device-size", "32MiB", "--host-size", "32MiB")
    with process(str(folder), *sizes, "--storage-url", f"file:{store}", *flags, home=home) as started:
        said = "\n".join(lines_until_ready(started))
        found = re.search(r"ready at (http://127\.0\.0\.1:\d+)/v1", said)
        assert found is not None, said
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0, timeout=120) as client:
            answered = [_ask(client, question) for question in questions]
        metrics = httpx.get(f"{found[1]}/metrics", timeout=60).text
        drafted = re.search(r"^hicache_engine_drafted_tokens_total (\S+)$", metrics, re.MULTILINE)
        assert drafted is not None
        return answered, float(drafted[1])


def _ask(client: openai.OpenAI, question: str) -> tuple[str, int]:
    done = client.chat.completions.create(
        model="hybrid",
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
        max_tokens=24,
        extra_body={"ignore_eos": True},
    )
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    return done.choices[0].message.content or "", done.usage.prompt_tokens_details.cached_tokens or 0


def test_a_hybrid_answers_alike_with_and_without_speculation_and_after_a_restart(models, tmp_path):
    target, draft = models
    plain, none_drafted = answers(target, tmp_path / "plain", tmp_path, [QUESTION, QUESTION])
    flags = ("--draft", str(draft), "--draft-tokens", "3")
    first, drafted = answers(target, tmp_path / "store", tmp_path, [QUESTION, QUESTION], *flags)
    again, drafted_again = answers(target, tmp_path / "store", tmp_path, [QUESTION], *flags)
    assert none_drafted == 0
    assert min(drafted, drafted_again) > 0
    assert plain[0][1] == first[0][1] == 0
    assert plain[1][1] > 200
    assert [first[1][1], again[0][1]] == [plain[1][1]] * 2
    assert {text for text, _ in (*plain, *first, *again)} == {plain[0][0]}
