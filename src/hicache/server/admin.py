"""What an operator may do to a running server, under /admin and only with the key: each route calls one operation."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

from fastapi import APIRouter, Depends
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from hicache.cache import Flushed
from hicache.config import redact
from hicache.engine.operations import Audit
from hicache.errors import ClosedError, ConfigError, InUseError, StorageError
from hicache.server.errors import SERVER, ApiError, invalid
from hicache.server.keys import Key
from hicache.units import Tier

if TYPE_CHECKING:
    from hicache.engine import EngineStats

PREFIX = "/admin"
ENDPOINTS = frozenset(
    f"{PREFIX}/{path}"
    for path in ("flush", "update_weights", "storage/attach", "storage/detach", "storage/switch", "audit", "stats")
)

T = TypeVar("T")


class AdminEngine(Protocol):
    """What of an engine an operator reaches. Thread-safe; calls block."""

    def flush(self, salt: str | None = None, *, tenant: str = "", force: bool = False) -> Flushed: ...

    def update_weights(self, folder: str, *, draft: str | None = None, force: bool = False) -> Flushed: ...

    def attach_storage(self, url: str, size: str | int | None = None) -> None: ...

    def detach_storage(self) -> None: ...

    def switch_storage(self, url: str, size: str | int | None = None) -> None: ...

    def audit(self) -> Audit: ...

    def stats(self) -> "EngineStats": ...

    def health(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Admin:
    """The admin routes' engine, and the key that opens them."""

    engine: AdminEngine
    key: Key


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


class FlushRequest(_Body):
    """What is to be forgotten: the pages of one salt of a tenant, or without either everything."""

    salt: Annotated[str, Field(max_length=4096)] | None = Field(None, description='"" is none.')
    tenant: Annotated[str, Field(max_length=4096)] | None = Field(
        None, description="Whose, by name; left out: nobody's in particular, as on a server without API keys."
    )
    force: bool = Field(False, description="Also while requests run on it: they go on with what they have.")


class UpdateWeightsRequest(_Body):
    """A checkpoint of the same architecture, on the server's own disk."""

    folder: Text
    draft: Text | None = Field(None, description="New weights of the draft model, where a checkpoint drafts.")
    force: bool = Field(False, description="Also while requests run: they begin again with what they have answered.")


class StorageRequest(_Body):
    """A store, as --storage-url and --storage-size name it."""

    url: Text
    size: Text | int | None = None


class ClearedReply(BaseModel):
    """What can't be found any more in one tier; `left_pages` could not be removed, and are not used."""

    pages: int
    bytes: int
    left_pages: int


class FlushReply(BaseModel):
    """By tier: device, host, storage."""

    cleared: dict[str, ClearedReply]
    problems: list[str]


class StorageReply(BaseModel):
    """What is degraded now, storage included."""

    degraded: list[str]


class AuditReply(BaseModel):
    """Every slot has exactly one owner. `idle`: no request is open, and nothing is pinned, lent or in flight."""

    clean: bool
    idle: bool
    open_matches: int
    pins: int
    in_flight: int


class StatsReply(BaseModel):
    """Counts since the start, and what there is now."""

    engine: dict[str, int]
    cache: dict[str, Any]


class ErrorBody(BaseModel):
    """OpenAI's form of an error."""

    error: dict[str, str | None]


_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "What is asked for makes no sense or does not fit",
        401: "Without the key",
        409: "Requests, or another store, are in the way",
        503: "The engine has ended, or storage does not answer",
    }.items()
}


def admin_router(admin: Admin) -> APIRouter:
    """The routes. Their key is checked by `KeyGuard`; the scheme here only describes it."""
    scheme = HTTPBearer(auto_error=False, description="The admin key")
    router = APIRouter(prefix=PREFIX, tags=["admin"], dependencies=[Depends(scheme)], responses=_REFUSALS)
    engine = admin.engine

    @router.post("/flush")
    def flush(body: FlushRequest) -> FlushReply:
        """Forget what was computed so far, in every tier."""
        salt = body.salt if body.tenant is None else body.salt or ""
        return _flush_reply(_answer("salt", lambda: engine.flush(salt, tenant=body.tenant or "", force=body.force)))

    @router.post("/update_weights")
    def update_weights(body: UpdateWeightsRequest) -> FlushReply:
        """Go on with other weights, and forget what the old ones computed."""
        return _flush_reply(
            _answer("folder", lambda: engine.update_weights(body.folder, draft=body.draft, force=body.force))
        )

    @router.post("/storage/attach")
    def attach(body: StorageRequest) -> StorageReply:
        """Use a store from now on."""
        _answer("url", lambda: engine.attach_storage(body.url, body.size))
        return StorageReply(degraded=list(engine.health()))

    @router.post("/storage/switch")
    def switch(body: StorageRequest) -> StorageReply:
        """Use another store from now on."""
        _answer("url", lambda: engine.switch_storage(body.url, body.size))
        return StorageReply(degraded=list(engine.health()))

    @router.post("/storage/detach")
    def detach() -> StorageReply:
        """Go on without a store."""
        _answer("url", engine.detach_storage)
        return StorageReply(degraded=list(engine.health()))

    @router.post("/audit")
    def audit() -> AuditReply:
        """Check that every slot has exactly one owner. If not, the answer is a 500 and the engine stops."""
        found = _answer("audit", engine.audit)
        return AuditReply(
            clean=True, idle=found.idle, open_matches=found.open_matches, pins=found.pins, in_flight=found.in_flight
        )

    @router.get("/stats")
    def stats() -> StatsReply:
        """The numbers a moment ago."""
        return _stats_reply(engine.stats())

    return router


def _answer(param: str, operation: Callable[[], T]) -> T:
    """What an operation returns; a refusal in OpenAI's form."""
    try:
        return operation()
    except InUseError as error:
        raise ApiError(409, str(error), code="in_use") from None
    except ConfigError as error:
        raise invalid(param, redact(str(error))) from None
    except StorageError as error:
        raise ApiError(503, redact(str(error)), kind=SERVER, code="storage_unavailable") from None
    except ClosedError as error:
        raise ApiError(503, str(error), kind=SERVER, code="engine_stopped") from None


def _flush_reply(flushed: Flushed) -> FlushReply:
    tiers = {Tier.DEVICE: flushed.device, Tier.HOST: flushed.host, Tier.STORAGE: flushed.storage}
    return FlushReply(
        cleared={
            tier.value: ClearedReply(pages=one.pages, bytes=one.size_bytes, left_pages=one.left_pages)
            for tier, one in tiers.items()
        },
        problems=list(flushed.problems),
    )


def _stats_reply(stats: "EngineStats") -> StatsReply:
    core, cache = stats.core, stats.cache
    pools: list[Mapping[str, object]] = [
        {
            "pool": pool.pool,
            "tier": pool.tier.value,
            "slots": pool.slots,
            "slot_bytes": pool.slot_bytes,
            "free": pool.free,
            "cached": pool.cached,
            "other": pool.other,
        }
        for pool in cache.pools
    ]
    return StatsReply(
        engine=asdict(core) | {"queued": stats.queued, "refused": stats.refused},
        cache={
            "pools": pools,
            "lookup_tokens": cache.lookup_tokens,
            "hit_tokens": {tier.value: tokens for tier, tokens in cache.hit_tokens.items()},
            "in_flight": cache.in_flight,
            "open_matches": cache.open_matches,
            "pins": cache.pins,
            "counters": dict(cache.counters),
        },
    )
