"""Every HTTP request is counted once, when it has ended, and none makes the server hold a body beyond the limit."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hicache.server import admin
from hicache.server.context import CLIENT_GONE
from hicache.server.metrics import ServerMetrics

ENDPOINTS = admin.ENDPOINTS | {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"}


class RequestMeter:
    """Counts by endpoint and status. A response that ends without its last part: the client hung up."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        self._metrics.request_started()
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            answer.failed()
            raise
        finally:
            path = scope["path"]
            self._metrics.request_ended(path if path in ENDPOINTS else "other", answer.status)


class _Answer:
    """Watches one response go by. `status` is what to count it under."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sent_status = CLIENT_GONE
        self.status = CLIENT_GONE

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._sent_status = message["status"]
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.status = self._sent_status
        await self._send(message)

    def failed(self) -> None:
        self.status = 500


class BodyLimit:
    """Stops reading a body after `limit_bytes`: the app sees a 413."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left_bytes = self._limit_bytes

        async def receive_some() -> Message:
            nonlocal left_bytes
            message = await receive()
            if message["type"] == "http.request":
                left_bytes -= len(message.get("body", b""))
                if left_bytes < 0:
                    # Else what is left of the body would be read to its end, for the sake of the connection.
                    raise HTTPException(413, headers={"Connection": "close"})
            return message

        await self._app(scope, receive_some, send)
