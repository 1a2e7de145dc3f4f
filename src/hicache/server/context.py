"""What every endpoint needs of one server, built once and never changed."""

import hashlib
from dataclasses import dataclass

from fastapi import Response

from hicache import __version__
from hicache.server.engine_like import EngineLike
from hicache.server.errors import model_not_found
from hicache.server.metrics import ServerMetrics
from hicache.server.prompts import PromptEncoder
from hicache.server.tenants import Keyring

CLIENT_GONE = 499
"""What logs show for a client that hung up."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """`fingerprint` changes with hicache's version and the model: it goes out as `system_fingerprint`."""

    engine: EngineLike
    metrics: ServerMetrics
    prompts: PromptEncoder
    fingerprint: str
    created: int
    keyring: Keyring

    def check_model(self, asked: str) -> None:
        """Raise a 404 in OpenAI's form for any model but the one served."""
        if asked != self.engine.model_name:
            raise model_not_found(asked, self.engine.model_name)


def client_gone() -> Response:
    """Nobody reads it: the status is for the log and the metrics."""
    return Response(status_code=CLIENT_GONE)


def system_fingerprint(model_name: str) -> str:
    """A short name for this version of hicache with this model."""
    digest = hashlib.sha256(f"{__version__}\0{model_name}".encode()).hexdigest()
    return f"fp_{digest[:12]}"
