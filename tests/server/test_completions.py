"""Completions: a prompt or several, as text or token ids, each answered as if it had come alone."""

from typing import Any

import openai
import pytest

from tests.server.fake_engine import BOS, FakeEngine

MODEL = "org/fake"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["AB"]),
        ([97, 98, 99], ["ABC"]),
        (["ab", "c"], ["AB", "C"]),
        ([[97], [98, 99]], ["A", "BC"]),
    ],
)
def test_every_form_of_prompt(client: Any, prompt, texts: list[str]) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt)
    assert answer.object == "text_completion"
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(map(len, texts))


@pytest.mark.parametrize("prompt", ["abcd", ["abcd", "x"]])
def test_stream(client: Any, prompt) -> None:
    texts = ["", ""]
    reasons = {}
    usage = None
    for chunk in client.completions.create(
        model=MODEL, prompt=prompt, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    prompts = [prompt] if isinstance(prompt, str) else prompt
    assert texts[: len(prompts)] == [one.upper() for one in prompts]
    assert reasons == dict.fromkeys(range(len(prompts)), "stop")
    assert usage is not None and usage.completion_tokens == sum(map(len, prompts))


def test_text_gets_special_tokens_and_ids_are_taken_as_they_are(client: Any, engine: FakeEngine) -> None:
    client.completions.create(model=MODEL, prompt="a")
    client.completions.create(model=MODEL, prompt=[97])
    assert [stream.prompt_ids for stream in engine.streams] == [(BOS, 97), (97,)]


def test_sixteen_tokens_unless_said_otherwise(client: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt="a" * 100)
    assert answer.choices[0].text == "A" * 16
    assert answer.choices[0].finish_reason == "length"


def test_default_shrinks_to_the_room_there_is(client: Any, engine: FakeEngine) -> None:
    client.completions.create(model=MODEL, prompt=[97] * (engine.max_model_len - 3))
    assert engine.streams[0].params.max_tokens == 3


def test_one_prompt_refused_means_none_is_run(client: Any, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[[97], [98] * 300])
    assert caught.value.param == "prompt[1]"
    assert engine.streams == []
