"""The HTTP surface: every path is listed here, and does nothing but call what answers it."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from hicache import __version__
from hicache.server.admin import PREFIX, Admin, admin_router
from hicache.server.chat import create_chat_completion
from hicache.server.completions import create_completion
from hicache.server.context import ServerContext, system_fingerprint
from hicache.server.engine_like import EngineLike
from hicache.server.engine_metrics import EngineCollector
from hicache.server.errors import install_handlers
from hicache.server.keys import NO_KEY, KeyGuard
from hicache.server.metrics import ServerMetrics
from hicache.server.middleware import BodyLimit, RequestMeter
from hicache.server.prompts import PromptEncoder
from hicache.server.schema import ChatRequest, CompletionRequest
from hicache.server.tenants import Keyring
from hicache.server.wire import Json

MAX_BODY_BYTES = 32 << 20


def build_app(engine: EngineLike, admin: Admin | None = None, keyring: Keyring | None = None) -> FastAPI:
    """The app that serves `engine` and closes it at shutdown. With `admin`, the same engine can be operated.

    With a `keyring` that has keys, /v1 is for those who have one, and /metrics for whoever may operate it.
    """
    keyring = Keyring() if keyring is None else keyring
    context = ServerContext(
        engine=engine,
        metrics=ServerMetrics(EngineCollector(engine.stats, engine.health)),
        prompts=PromptEncoder(engine.tokenizer, engine.max_model_len),
        fingerprint=system_fingerprint(engine.model_name),
        created=int(time.time()),
        keyring=keyring,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(title="hicache", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    if admin is not None:
        app.include_router(admin_router(admin))
        app.add_middleware(KeyGuard, prefix=PREFIX, key=admin.key)
    if keyring:
        app.add_middleware(KeyGuard, prefix="/v1", key=keyring)
        app.add_middleware(KeyGuard, prefix="/metrics", key=NO_KEY if admin is None else admin.key)
    app.add_middleware(BodyLimit, limit_bytes=MAX_BODY_BYTES)
    app.add_middleware(RequestMeter, metrics=context.metrics)
    install_handlers(app)
    _add_openai(app, context)
    _add_operations(app, context)
    return app


def _add_openai(app: FastAPI, context: ServerContext) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await create_chat_completion(context, request, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await create_completion(context, request, body)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(context)]})

    @app.get("/v1/models/{model:path}")
    async def model_card(model: str) -> Response:
        context.check_model(model)
        return JSONResponse(_model_card(context))


def _add_operations(app: FastAPI, context: ServerContext) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while requests are answered: what is degraded is listed, and serving goes on without it. Else 503."""
        degraded = list(context.engine.health())
        if not context.engine.alive:
            return JSONResponse({"status": "stopped", "degraded": degraded}, status_code=503)
        return JSONResponse({"status": "degraded" if degraded else "ok", "degraded": degraded})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _model_card(context: ServerContext) -> Json:
    return {
        "id": context.engine.model_name,
        "object": "model",
        "created": context.created,
        "owned_by": "hicache",
        "max_model_len": context.engine.max_model_len,
    }
