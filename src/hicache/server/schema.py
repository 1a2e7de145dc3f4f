"""A parsed request holds supported fields only, strictly typed: nothing in it would be ignored in the answer."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from hicache.engine.types import MOST_PRIORITY, CacheUse
from hicache.server.errors import unsupported
from hicache.server.refusals import CHAT, COMPLETION, HARMLESS, MESSAGE, JsonObject, Refusal, refuse, without

MAX_STOPS = 16
MAX_PROMPTS = 128
MOST_SALT = 4096
MOST_TTL_S = 366 * 24 * 3600

Prompt: TypeAlias = str | tuple[int, ...]
"""A prompt as the client gave it: text, or token ids."""


def _bad(message: str) -> PydanticCustomError:
    return PydanticCustomError("bad_value", "{message}", {"message": message})


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _bad("this text holds half of a surrogate pair; send valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


def _stops(value: object) -> object:
    if value is None:
        return ()
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise _bad("a string or a list of strings is needed")
    if len(stops) > MAX_STOPS:
        raise _bad(f"{len(stops)} stop strings are given; at most {MAX_STOPS} are supported")
    if not all(stops):
        raise _bad("a stop string can't be empty")
    return tuple(stops)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Strict):
    """`include_obfuscation` is accepted and ignored: it pads events, the answer stays."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CacheOptions(_Strict):
    """What a request does with cached pages. None stands for the default."""

    read: bool | None = Field(default=None, description="false: compute all; true by default")
    write: bool | None = Field(default=None, description="false: leave nothing behind; true by default")
    priority: int | None = Field(
        default=None,
        ge=-MOST_PRIORITY,
        le=MOST_PRIORITY,
        description="pages of higher ones stay longer, under the eviction policy priority; the request's by default",
    )
    ttl: float | None = Field(default=None, gt=0, le=MOST_TTL_S, description="how long they do, in seconds")

    def use(self) -> CacheUse:
        """The same as the engine takes it."""
        return CacheUse(self.read is not False, self.write is not False, self.priority, self.ttl)


class _Request(_Strict):
    """What both endpoints share. None stands for the default."""

    model: Text
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, description="0 and -1: all tokens")
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[Text, ...], BeforeValidator(_stops)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    priority: int | None = Field(
        default=None, ge=-MOST_PRIORITY, le=MOST_PRIORITY, description="higher goes first; 0 by default"
    )
    cache: CacheOptions | None = None
    cache_salt: Text | None = Field(
        default=None, max_length=MOST_SALT, description="keeps cached pages apart; empty: none"
    )
    ignore_eos: bool | None = Field(default=None, description="go on until max_tokens or a stop string")

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "_Request":
        if self.stream_options is not None and not self.stream:
            raise unsupported("stream_options", "only allowed when stream is true")
        return self

    @property
    def wants_usage(self) -> bool:
        """The last chunk of a stream shall carry the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens the answer may have; None: not said."""
        return self.max_tokens


def _checked(body: Any, table: Mapping[str, Refusal]) -> Any:
    if not isinstance(body, dict):
        return body
    fields: JsonObject = body
    refuse(fields, table)
    return without(fields, table, HARMLESS)


def _joined(content: object) -> object:
    """A list of text parts is one text, a part per line; a part that isn't text is refused by its type."""
    if content is None:
        raise _bad("a string or a list of text parts is needed")
    if not isinstance(content, list):
        return content
    return "\n".join(_part_text(index, part) for index, part in enumerate(content))


def _part_text(index: int, part: object) -> str:
    if not isinstance(part, dict) or "type" not in part:
        raise _bad(f"part {index} must be an object with a type")
    if part["type"] != "text":
        raise _bad(f"part {index} has type {part['type']!r}; only 'text' is supported")
    text = part.get("text")
    if not isinstance(text, str) or set(part) - {"type", "text"}:
        raise _bad(f"part {index} must have a 'text' string and nothing else")
    return text


class ChatMessage(_Strict):
    """One turn. `developer` is the newer name of `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_joined)]

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        for field, refusal in MESSAGE.items():
            if field in message and message[field] not in refusal.neutral:
                raise _bad(f"{field} is not supported; leave it out")
        return without(message, MESSAGE)

    @property
    def template_role(self) -> str:
        """The name that chat templates know the role by."""
        return "system" if self.role == "developer" else self.role


class ChatRequest(_Request):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        return _checked(body, CHAT)

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise unsupported("max_tokens", "contradicts max_completion_tokens; send one of the two")
        return self

    @property
    def answer_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def _prompts(value: object) -> object:
    """One prompt or a list of prompts, each a text or a list of token ids, as a tuple of prompts."""
    if isinstance(value, str):
        return (_encodable(value),)
    if not isinstance(value, list) or not value:
        raise _bad("a string, a list of strings, a list of token ids or a list of such lists is needed")
    if all(isinstance(item, str) for item in value):
        return _few(tuple(map(_encodable, value)))
    if all(_is_id(item) for item in value):
        return (tuple(value),)
    if all(isinstance(item, list) and item and all(map(_is_id, item)) for item in value):
        return _few(tuple(tuple(item) for item in value))
    raise _bad("a list must hold strings only, token ids (whole numbers from 0) only, or lists of token ids only")


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def _few(prompts: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    if len(prompts) > MAX_PROMPTS:
        raise _bad(f"{len(prompts)} prompts are given; at most {MAX_PROMPTS} are supported in one request")
    return prompts


class CompletionRequest(_Request):
    """The body of POST /v1/completions. `prompt` is parsed to a tuple of prompts."""

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_prompts)]

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        return _checked(body, COMPLETION)
