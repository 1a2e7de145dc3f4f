"""Every error leaves the server in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from hicache.errors import CapacityError, ClosedError, ConfigError, QueueFullError

INVALID = "invalid_request_error"
SERVER = "server_error"
RATE_LIMIT = "rate_limit_error"


class ApiError(Exception):
    """An answer other than 200. `param` names the field that is wrong, `code` is for programs, `message` for people.

    `retry_after_s`: when it may help to ask again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """The JSON object to send, also as the last event of a stream that fails."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        # ASCII only: a message may quote what the client sent, lone surrogates included.
        content = json.dumps(self.body()).encode("ascii")
        retry = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return Response(
            content, status_code=self.status, media_type="application/json", headers={**retry, **(headers or {})}
        )


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """400: the field `param` can't be accepted."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """400: the field `param` would change the answer in a way this server can't."""
    return invalid(param, message, "unsupported_parameter")


def model_not_found(asked: str, served: str) -> ApiError:
    """404 for a model that isn't served, with the one that is."""
    message = f"model: {asked!r} is not served here; this server has {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def context_too_long(param: str, prompt_tokens: int, answer_tokens: int, limit_tokens: int) -> ApiError:
    """400: `prompt_tokens` plus `answer_tokens` don't fit into `limit_tokens`."""
    over = prompt_tokens + answer_tokens - limit_tokens
    advice = f"shorten the prompt by {over} tokens" if prompt_tokens >= limit_tokens else f"ask for {over} tokens less"
    message = (
        f"{param}: the prompt has {prompt_tokens} tokens and {answer_tokens} are asked for, "
        f"but prompt and answer together can have {limit_tokens}; {advice}"
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def text_too_long(param: str, characters: int, limit_characters: int, limit_tokens: int) -> ApiError:
    """400: a text so long that it can't fit, told before it is encoded."""
    message = (
        f"{param}: the prompt has {characters} characters, and prompt and answer can have {limit_tokens} tokens;"
        f" keep it below {limit_characters} characters"
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def engine_failed(message: str) -> ApiError:
    """500: the engine gave up on this request."""
    return ApiError(500, message, kind=SERVER, code="engine_error")


def stopping() -> ApiError:
    """503: the server is going down."""
    return ApiError(503, "the server is stopping; try again later", kind=SERVER, code="server_stopping")


def from_cache_error(error: CapacityError | ClosedError | ConfigError | QueueFullError, param: str) -> ApiError:
    """What a refusal by the engine means to a client."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), kind=RATE_LIMIT, code="queue_full", retry_after_s=error.retry_after_s)
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), kind=SERVER, code="engine_stopped")
    return invalid(param, str(error), "context_length_exceeded" if isinstance(error, CapacityError) else None)


def install_handlers(app: FastAPI) -> None:
    """Turn every exception that reaches the app into OpenAI's form."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def on_validation(request: Request, error: RequestValidationError) -> Response:
        return from_validation(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        return from_http(error, request.method, request.url.path).response(error.headers)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        # Starlette raises the error again after this answer: the log gets its traceback, and uvicorn hangs up.
        message = f"the server failed on {request.url.path} ({type(error).__name__}); its log has the details"
        return ApiError(500, message, kind=SERVER, code="internal_error").response({"Connection": "close"})


def from_http(error: HTTPException, method: str, path: str) -> ApiError:
    """An unknown path, a wrong method, a body that is too large or can't be read."""
    if error.status_code == 404:
        return ApiError(404, f"unknown path {path}: the API lies under /v1", code="unknown_url")
    if error.status_code == 405:
        return ApiError(405, f"{method} is not allowed on {path}", code="method_not_allowed")
    if error.status_code == 413:
        return ApiError(413, "the body is too large; send a shorter prompt", code="body_too_large")
    return ApiError(error.status_code, str(error.detail))


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's findings, with the field's path as a client would write it."""
    first = errors[0]
    kind = first["type"]
    if kind == "json_invalid":
        at = first["loc"][-1]
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at byte {at}", code="invalid_json")
    param = field_path(first["loc"])
    if param is None:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    if kind == "missing":
        return invalid(param, "this field is required", "missing_required_parameter")
    if kind == "extra_forbidden":
        return invalid(param, "unknown field; leave it out", "unknown_parameter")
    return invalid(param, str(first["msg"]))


def field_path(loc: Sequence[int | str]) -> str | None:
    """`("body", "messages", 0, "role")` is `messages[0].role`; the body itself is None."""
    path = ""
    for part in loc[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or None
