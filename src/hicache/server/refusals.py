"""A field that would change the answer and isn't supported is refused by name, unless its value is neutral."""

from collections.abc import Mapping
from dataclasses import dataclass

from hicache.server.errors import ApiError, unsupported

JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Refusal:
    """`neutral` values ask for nothing special; `advice` says what to do instead of any other."""

    neutral: tuple[object, ...]
    advice: str


def _off(*neutral: object) -> Refusal:
    return Refusal((None, *neutral), "not supported; leave it out")


_SHARED: Mapping[str, Refusal] = {
    "n": Refusal((None, 1), "only 1 is supported; send one request per answer"),
    "logit_bias": _off({}),
    "presence_penalty": _off(0),
    "frequency_penalty": _off(0),
    "repetition_penalty": _off(1),
    "top_logprobs": _off(0),
    "logprobs": _off(False),
}

CHAT: Mapping[str, Refusal] = {
    **_SHARED,
    "tools": _off([]),
    "tool_choice": _off("none", "auto"),
    "functions": _off([]),
    "function_call": _off("none", "auto"),
    "response_format": _off({"type": "text"}),
    "modalities": _off(["text"]),
    "audio": _off(),
    "reasoning_effort": _off("none"),
    "verbosity": _off(),
    "web_search_options": _off(),
    "chat_template_kwargs": _off({}),
}

COMPLETION: Mapping[str, Refusal] = {
    **_SHARED,
    "echo": _off(False),
    "suffix": _off(""),
    "best_of": Refusal((None, 1), "only 1 is supported; send one request per answer"),
}

MESSAGE: Mapping[str, Refusal] = {
    "tool_calls": _off([]),
    "tool_call_id": _off(),
    "function_call": _off(),
    "name": _off(),
    "audio": _off(),
    "refusal": _off(),
    "annotations": _off([]),
}

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "prediction",
    }
)
"""Fields of OpenAI's API that can't change the answer here: accepted and ignored."""


def refuse(body: JsonObject, table: Mapping[str, Refusal], where: str = "") -> None:
    """Raise `ApiError` for the first field of `table` whose value in `body` isn't neutral."""
    for field, refusal in table.items():
        if field in body and not any(_same(body[field], value) for value in refusal.neutral):
            raise _refused(where + field, refusal)


def _refused(param: str, refusal: Refusal) -> ApiError:
    return unsupported(param, refusal.advice)


def without(
    body: JsonObject, table: Mapping[str, Refusal], harmless: frozenset[str] = frozenset()
) -> dict[str, object]:
    """The body less the fields that ask for nothing: what is left is supported or unknown."""
    return {field: value for field, value in body.items() if field not in table and field not in harmless}


def _same(value: object, neutral: object) -> bool:
    # True == 1 in Python, but `n: true` is not `n: 1`.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
