"""Chat completions through the official client: whole and streamed, with the usage that says what was cached."""

from typing import Any

import openai
import pytest

from tests.server.fake_engine import FakeEngine

MODEL = "org/fake"
HELLO = [{"role": "user", "content": "hello"}]


def test_answer_has_openais_shape(client: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.system_fingerprint is not None and answer.system_fingerprint.startswith("fp_")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "USER:HELLO;"
    assert answer.choices[0].finish_reason == "stop"


def test_usage_lists_every_tier_zero_included(client: Any) -> None:
    cold = client.chat.completions.create(model=MODEL, messages=HELLO).to_dict()["usage"]
    warm = client.chat.completions.create(model=MODEL, messages=HELLO).to_dict()["usage"]
    assert cold == {
        "prompt_tokens": 11,
        "completion_tokens": 11,
        "total_tokens": 22,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "cached_tokens_by_tier": {"device": 0, "host": 0, "storage": 0},
        },
    }
    assert warm["prompt_tokens_details"] == {
        "cached_tokens": 10,
        "cached_tokens_by_tier": {"device": 10, "host": 0, "storage": 0},
    }


def test_stream_begins_with_the_role_and_ends_with_a_reason(client: Any) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "USER:HELLO;"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("usage" not in chunk.to_dict() for chunk in chunks)


def test_stream_ends_with_usage_when_asked(client: Any) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk.to_dict() for chunk in stream]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["prompt_tokens"] == 11
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["prompt_tokens_details"]["cached_tokens_by_tier"] == {"device": 0, "host": 0, "storage": 0}


def test_sampling_reaches_the_engine(client: Any, engine: FakeEngine) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["Z"],
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "priority": -7},
    )
    params = engine.streams[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 5)
    assert (params.min_p, params.seed, params.stop, params.ignore_eos) == (0.1, 3, ("Z",), True)
    assert engine.streams[0].priority == -7


def test_what_is_left_open_takes_the_defaults(client: Any, engine: FakeEngine) -> None:
    client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"top_k": -1})
    params = engine.streams[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.stop) == (1.0, 1.0, 0, None, ())
    assert params.max_tokens == engine.max_model_len - 11


def test_neutral_values_that_sdks_send_are_accepted(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[*HELLO, {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None}, *HELLO],
        n=1,
        logprobs=False,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        extra_body={"safety_identifier": "a", "prompt_cache_key": "b", "stream_options": None, "functions": None},
    )
    assert answer.choices[0].finish_reason == "stop"


def test_text_parts_are_lines_of_one_message(client: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "developer", "content": parts}])
    assert answer.choices[0].message.content == "SYSTEM:ONE\nTWO;"


def test_no_chat_template_says_what_to_use(client: Any, engine: FakeEngine) -> None:
    engine.tokenizer.chat_template = None
    with pytest.raises(openai.BadRequestError, match="/v1/completions") as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO)
    assert caught.value.code == "no_chat_template"


def test_template_that_refuses_is_a_400(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="first turn") as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "assistant", "content": "x"}])
    assert caught.value.param == "messages"
