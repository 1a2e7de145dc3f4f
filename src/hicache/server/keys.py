"""Paths that need a key answer nobody without it; keys are compared in constant time, and never shown."""

import hmac
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from hicache.server.errors import ApiError

_SCHEME = b"bearer"


@dataclass(frozen=True, slots=True)
class Key:
    """A secret that clients send as `Authorization: Bearer KEY`."""

    secret: str = field(repr=False)

    def opens(self, scope: Scope) -> bool:
        """Whether a request carries this key, and carries it once."""
        given = bearer(scope)
        return given is not None and hmac.compare_digest(given, self.secret.encode())


def bearer(scope: Scope) -> bytes | None:
    """The secret that a request carries as `Authorization: Bearer KEY`, if it does so once."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return None
    scheme, _, secret = given[0].partition(b" ")
    return secret.strip() if scheme.lower() == _SCHEME else None


class Lock(Protocol):
    """Says which requests may pass."""

    def opens(self, scope: Scope) -> bool:
        """Whether a request carries what it needs."""


class _NoKey:
    def opens(self, scope: Scope) -> bool:
        return False


NO_KEY = _NoKey()
"""Lets nobody pass."""


class KeyGuard:
    """Lets requests to `prefix` and all below it pass only with the key: else 401, before their body is read."""

    def __init__(self, app: ASGIApp, prefix: str, key: Lock) -> None:
        self._app = app
        self._prefix = prefix
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._prefix}/")
        if guarded and not self._key.opens(scope):
            await no_key(scope["path"]).response({"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)


def no_key(path: str) -> ApiError:
    """401: the key is missing or another."""
    return ApiError(401, f"{path} needs its key, sent as Authorization: Bearer KEY", code="invalid_api_key")
