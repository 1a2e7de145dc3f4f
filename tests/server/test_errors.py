"""Whatever is wrong, the answer has OpenAI's form and names what to change."""

import json

import httpx
import pytest

from hicache.errors import CapacityError, ClosedError, ConfigError, QueueFullError
from tests.server.fake_engine import FailingStream, FakeEngine

MODEL = "org/fake"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": MODEL, "prompt": "hi"}


def error_of(response: httpx.Response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


def post(http: httpx.Client, path: str, body: object) -> httpx.Response:
    """Send what httpx's own encoder refuses too, such as half a surrogate pair."""
    return http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (path, field, value)
        for path, fields in {
            CHAT: {
                "n": 2,
                "logprobs": True,
                "top_logprobs": 3,
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
                "functions": [{"name": "f"}],
                "function_call": {"name": "f"},
                "response_format": {"type": "json_object"},
                "presence_penalty": 0.5,
                "frequency_penalty": -1,
                "repetition_penalty": 1.1,
                "logit_bias": {"5": 1},
                "modalities": ["text", "audio"],
                "audio": {"voice": "x"},
                "reasoning_effort": "low",
                "web_search_options": {},
                "guided_regex": "a+",
            },
            TEXT: {"n": True, "echo": True, "suffix": "x", "best_of": 2, "logprobs": 0, "messages": []},
        }.items()
        for field, value in fields.items()
    ],
)
def test_field_that_would_change_the_answer_is_named(
    http: httpx.Client, engine: FakeEngine, path: str, field: str, value: object
) -> None:
    error = error_of(http.post(path, json={**(HELLO if path == CHAT else PROMPT), field: value}))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")
    assert engine.streams == []


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", 2.1, "temperature"),
        ("priority", 101, "priority"),
        ("priority", -101, "priority"),
        ("priority", 0.5, "priority"),
        ("temperature", "0.5", "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", 0, "top_p"),
        ("top_k", 1.5, "top_k"),
        ("min_p", -0.1, "min_p"),
        ("seed", 2**63, "seed"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", "5", "max_tokens"),
        ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("stop", [""], "stop"),
        ("stop", ["x"] * 17, "stop"),
        ("stop", [5], "stop"),
        ("model", 5, "model"),
        ("model", None, "model"),
        ("messages", [], "messages"),
        ("messages", "hi", "messages"),
        ("messages", ["hi"], "messages[0]"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": None}], "messages[0].content"),
        ("messages", [{"role": "tool", "content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": "x", "tool_calls": [1]}], "messages[0]"),
        ("messages", [{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content"),
    ],
)
def test_wrong_value_is_named(http: httpx.Client, field: str, value: object, param: str) -> None:
    error = error_of(post(http, CHAT, {**HELLO, field: value}))
    assert error["param"] == param


@pytest.mark.parametrize("part", ["image_url", "input_audio", "file"])
def test_part_that_is_not_text_is_refused_by_name(http: httpx.Client, part: str) -> None:
    content = [{"type": "text", "text": "see"}, {"type": part}]
    error = error_of(http.post(CHAT, json={**HELLO, "messages": [{"role": "user", "content": content}]}))
    assert part in error["message"]


def test_two_limits_that_differ(http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, json={**HELLO, "max_tokens": 1, "max_completion_tokens": 2}))
    assert error["param"] == "max_tokens"


def test_stream_options_need_a_stream(http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, json={**HELLO, "stream": True, "stream_options": {"other": 1}}))
    assert error["param"] == "stream_options.other"


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [1.5], [-1], [True], ["a", 5], {"a": 1}, [300], "\ud800", ["a", "\ud800"]]
)
def test_wrong_prompt(http: httpx.Client, engine: FakeEngine, prompt: object) -> None:
    engine.tokenizer.begins = False
    error = error_of(post(http, TEXT, {**PROMPT, "prompt": prompt}))
    assert error["param"] == "prompt"


def test_missing_field_is_named(http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, json={"model": MODEL}))
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"hi"', b"\xff\xfe{", b'{"model": NaN}', b"[" * 100_000])
def test_body_that_is_no_object(http: httpx.Client, path: str, body: bytes) -> None:
    error_of(http.post(path, content=body, headers={"content-type": "application/json"}))


def test_body_of_another_type(http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, content=b"model=x", headers={"content-type": "application/x-www-form-urlencoded"}))
    assert "application/json" in error["message"]


def test_body_that_is_too_large(http: httpx.Client) -> None:
    response = http.post(TEXT, json={**PROMPT, "user": "x" * (33 << 20)})
    assert error_of(response, 413)["code"] == "body_too_large"
    assert response.headers["connection"] == "close"


def test_unknown_model_says_what_is_served(http: httpx.Client) -> None:
    for response in (http.post(CHAT, json={**HELLO, "model": "gpt"}), http.get("/v1/models/gpt")):
        error = error_of(response, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "gpt" in error["message"] and MODEL in error["message"]


def test_prompt_too_long_gives_the_numbers(http: httpx.Client, engine: FakeEngine) -> None:
    error = error_of(http.post(TEXT, json={**PROMPT, "prompt": [97] * 250}))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "250" in error["message"] and "200" in error["message"] and "shorten the prompt by 51" in error["message"]
    error = error_of(http.post(TEXT, json={**PROMPT, "prompt": [97] * 150, "max_tokens": 60}))
    assert "ask for 10 tokens less" in error["message"]
    error = error_of(http.post(CHAT, json={**HELLO, "messages": [{"role": "user", "content": "x" * 300}]}))
    assert error["param"] == "messages"
    assert engine.streams == []


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "encode", None)
    text = "x" * (200 * 128 + 1)
    for path, body in (
        (TEXT, {**PROMPT, "prompt": text}),
        (CHAT, {**HELLO, "messages": [{"role": "user", "content": text}]}),
    ):
        error = error_of(http.post(path, json=body))
        assert error["code"] == "context_length_exceeded"
        assert "25601 characters" in error["message"] and "below 25600" in error["message"]


def test_unknown_path_and_method(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/nothing"), 404)["code"] == "unknown_url"
    response = http.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_what_the_engine_refuses_is_a_400_and_a_closed_engine_a_503(http: httpx.Client, engine: FakeEngine) -> None:
    engine.refusal = CapacityError("12 pages are needed; there are 8")
    error = error_of(http.post(TEXT, json=PROMPT))
    assert error["code"] == "context_length_exceeded" and "there are 8" in error["message"]
    engine.refusal = ClosedError("closed")
    assert error_of(http.post(TEXT, json=PROMPT), 503)["code"] == "engine_stopped"
    engine.refusal = ConfigError("token id 7 does not exist")
    assert error_of(http.post(TEXT, json=PROMPT))["param"] == "prompt"


@pytest.mark.parametrize("body", [PROMPT, {**PROMPT, "stream": True}, {**PROMPT, "prompt": ["a", "b"]}])
def test_a_full_queue_is_a_429_that_says_when_to_ask_again(http: httpx.Client, engine: FakeEngine, body: dict) -> None:
    engine.refusal = QueueFullError("3 requests wait; ask again in 7 s", 7)
    response = http.post(TEXT, json=body)
    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert response.headers["retry-after"] == "7"
    assert engine.streams == []


def test_of_several_prompts_the_one_that_is_refused_is_named_and_none_starts(
    http: httpx.Client, engine: FakeEngine
) -> None:
    engine.refusals = {(256, *b"bad"): CapacityError("it needs 9 slots; there are 8")}
    error = error_of(http.post(TEXT, json={**PROMPT, "prompt": ["good", "bad"]}))
    assert (error["param"], error["code"]) == ("prompt[1]", "context_length_exceeded")
    assert engine.streams == []


def test_bug_is_a_500_that_tells_no_secrets(http: httpx.Client, engine: FakeEngine) -> None:
    engine.refusal = RuntimeError("/home/me/secret")
    error = error_of(http.post(TEXT, json=PROMPT), 500)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    engine.refusal = None
    assert http.post(TEXT, json=PROMPT).status_code == 200


def test_engine_that_fails_half_way(http: httpx.Client, engine: FakeEngine) -> None:
    engine.stream_class = FailingStream
    error = error_of(http.post(TEXT, json=PROMPT), 500)
    assert error["code"] == "engine_error" and "fell over" in error["message"]
    lines = http.post(TEXT, json={**PROMPT, "stream": True}).text.strip().split("\n\n")
    assert "fell over" in lines[-2]
    assert lines[-1] == "data: [DONE]"
