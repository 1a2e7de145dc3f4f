"""The engine behind a door that any thread may use: one thread of its own runs the core, and nobody else touches it."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from hicache.cache import CacheStats, Flush, Flushed, Imported, Quota
from hicache.cache.tokens import Tokens
from hicache.engine import operations
from hicache.engine.core import EngineCore
from hicache.engine.model import Tokenizer
from hicache.engine.places import Places
from hicache.engine.request import Request
from hicache.engine.stream import Stream
from hicache.engine.types import Ask, Chunk, SamplingParams
from hicache.engine.work import CoreStats
from hicache.errors import CapacityError, ClosedError, ConfigError, InUseError, InvariantError
from hicache.keys import Namespace

log = logging.getLogger("hicache")

T = TypeVar("T")

_WAITING_S = 0.001
"""How long to wait when requests wait for transfers."""
_SETTLING_S = 0.005
"""How long to wait when only transfers are under way."""
_IDLE_S = 0.5
FLUSH_TIMEOUT_S = 60.0
"""How long a flush waits for storage."""
_STATS_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while an engine runs. `end_of_text` are the token ids that end an answer."""

    model_name: str
    max_model_len: int
    vocabulary: int
    end_of_text: frozenset[int]
    namespace: Namespace
    exact: bool
    sizes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The core's counts and the cache's, taken together.

    `queued` requests were submitted and not admitted so far; `refused` ones got no place in the queue.
    """

    core: CoreStats
    cache: CacheStats
    queued: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Command:
    """Something for the engine's thread: `run` is called there, or `drop` if the engine ends first."""

    run: Callable[[], None]
    drop: Callable[[], None]


class Engine:
    """Runs requests until it is closed. A bug in the cache's accounting stops it, and `health` says so."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        info: EngineInfo,
        max_waiting: int,
        weights: operations.NewWeightsLoader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.info = info
        self._core = core
        self._weights = weights
        self._exchanging = threading.Lock()
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._places = Places(max_waiting)
        self._inbox: deque[_Command] = deque()
        self._open: dict[int, Request] = {}
        self._closing = False
        self._failure: str | None = None
        self._stats = EngineStats(core.stats(), core.cache.stats())
        self._health = core.cache.health()
        self._stats_s = 0.0
        self._thread = threading.Thread(target=self._run, name="hicache-engine", daemon=True)
        self._thread.start()

    @property
    def model_name(self) -> str:
        """What the model is called."""
        return self.info.model_name

    @property
    def max_model_len(self) -> int:
        """The most tokens that prompt and answer can have together."""
        return self.info.max_model_len

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, salt: str = "", priority: int = 0) -> Stream:
        """Start a request; `salt` keeps its pages apart from those of other tenants, a higher `priority` goes first.

        Raises as `submit_all` does, and ConfigError for a priority that is out of bounds.
        """
        return self.submit_all([Ask(prompt_ids, params, salt, priority)])[0]

    def submit_all(self, asks: Sequence[Ask]) -> list[Stream]:
        """Start some requests together, all or none.

        Raises ConfigError for a prompt that makes no sense, CapacityError for one that can never fit, QueueFullError
        when too many wait, ClosedError after `close` or a failure of the engine.
        """
        for ask in asks:
            self.check(ask)
        submitted_s = time.monotonic()
        started = [self._new_request(ask, submitted_s) for ask in asks]
        with self._changed:
            self._require_running()
            self._places.take([request.id for request, _ in started])
            for request, _ in started:
                self._open[request.id] = request
                self._inbox.append(_Command(partial(self._add, request), request.abort))
            self._changed.notify_all()
        return [stream for _, stream in started]

    def _new_request(self, ask: Ask, submitted_s: float) -> tuple[Request, Stream]:
        request_id = next(self._ids)
        stream = Stream(abort=lambda: self._abort(request_id))
        request = Request(
            request_id,
            ask.prompt_ids,
            ask.params,
            self.info.namespace.with_tenant(ask.tenant, ask.salt),
            self.tokenizer,
            self.info.end_of_text,
            self._emitter(request_id, stream),
            submitted_s,
            partial(self._places.leave, request_id),
            ask.priority,
            ask.cache,
        )
        return request, stream

    def call(self, function: Callable[[EngineCore], T], timeout_s: float | None = None) -> T:
        """Run `function(core)` on the engine's thread, between two steps, and return what it returns or raises."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(self._core))
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, InvariantError):
                    raise

        def drop() -> None:
            future.set_exception(ClosedError("the engine was closed; start another"))

        with self._changed:
            self._require_running()
            self._inbox.append(_Command(run, drop))
            self._changed.notify_all()
        return future.result(timeout_s)

    def stats(self) -> EngineStats:
        """The numbers a moment ago: taken between steps, every quarter of a second while requests run."""
        return replace(self._stats, queued=self._places.queued, refused=self._places.refused)

    def flush(
        self, salt: str | None = None, *, tenant: str = "", force: bool = False, timeout_s: float = FLUSH_TIMEOUT_S
    ) -> Flushed:
        """Make what was computed so far unfindable in every tier: for one salt of a tenant ("": for none), or for all.

        Raises InUseError while requests run on it, unless forced: they then go on, and what they compute is not shared.
        StorageError when storage does not answer in time.
        """
        namespace = None if salt is None else self.info.namespace.with_tenant(tenant, salt)
        return operations.flush(self, namespace, force=force, timeout_s=timeout_s)

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Promise memory to tenants, before the first request. Raises ConfigError for more than there is."""
        if quotas:
            self.call(lambda core: core.cache.set_quotas(quotas))

    def update_weights(
        self, folder: str, *, draft: str | None = None, force: bool = False, timeout_s: float = FLUSH_TIMEOUT_S
    ) -> Flushed:
        """Take the weights of another checkpoint of the same model (and of its draft), and flush what the old computed.

        They are loaded while requests run, and taken between two steps. What an answer has so far stays. Raises
        ConfigError, by name, for a checkpoint that does not fit; InUseError while requests run, unless forced: they
        then begin again with what they have answered; StorageError as `flush`.
        """
        with self._exchanging:
            if self._weights is None:
                raise ConfigError("this engine was not told where its weights come from; start another")
            new = self._weights.load(folder, draft)
            begun = self.call(lambda core: self._exchange(core, new, force=force))
        return operations.finish(self, begun, timeout_s)

    def _exchange(self, core: EngineCore, new: operations.NewWeights, *, force: bool) -> Flush:
        if core.admitted and not force:
            raise InUseError(
                f"{core.admitted} requests run on the weights that are to go; ask again when they have ended, or force"
                " it: they then begin again with what they have answered"
            )
        self.info = replace(self.info, namespace=new.namespace)
        core.begin_again(self._current)
        new.take()
        return core.cache.flush(force=True, used_only=True)

    def _add(self, request: Request) -> None:
        request.namespace = self._current(request.namespace)
        self._core.add(request)

    def _current(self, namespace: Namespace) -> Namespace:
        """The namespace of the weights that run now, for the same tenant."""
        return replace(self.info.namespace, tenant=namespace.tenant, salt=namespace.salt, adapter=namespace.adapter)

    def attach_storage(self, url: str, size: str | int | None = None) -> None:
        """Use a store (`file:./store`, of at most `size`) from now on, while requests run.

        Raises InUseError when one is attached, ConfigError or StorageError when this one can't be had.
        """
        operations.attach(self, url, size)

    def detach_storage(self) -> None:
        """Stop using the store; nothing happens when there is none."""
        operations.detach(self)

    def switch_storage(self, url: str, size: str | int | None = None) -> None:
        """Use another store from now on. Raises as `attach_storage`, and then goes on with the one it has."""
        operations.switch(self, url, size)

    def export_prefix(
        self, tokens: Tokens, path: str | Path, salt: str = "", *, tenant: str = "", timeout_s: float = FLUSH_TIMEOUT_S
    ) -> int:
        """Write what is cached of a prompt's full pages to one safetensors file (0600); returns how many pages.

        Raises CapacityError if nothing of it can be resumed, StorageError if the file can't be written.
        """
        return operations.export_prefix(self, tokens, self.info.namespace.with_tenant(tenant, salt), path, timeout_s)

    def import_prefix(self, path: str | Path, salt: str = "", *, tenant: str = "") -> Imported:
        """Take an exported prefix into host memory, as far as there is room, and offer it to the store.

        StorageError for a damaged file, ConfigError for a foreign one; both say why, and nothing was taken.
        """
        return operations.import_prefix(self, path, self.info.namespace.with_tenant(tenant, salt))

    def audit(self) -> operations.Audit:
        """Check between two steps that every slot has one owner. An InvariantError is raised, and stops the engine."""
        return operations.audit(self)

    @property
    def alive(self) -> bool:
        """Whether it still runs requests. False for good after a bug in the cache's accounting, or after `close`."""
        return self._failure is None and not self._closing

    def health(self) -> tuple[str, ...]:
        """One sentence for each thing that is degraded; empty when all is well."""
        if self._failure is not None:
            return (f"the engine has stopped: {self._failure}",)
        return self._health

    def close(self) -> None:
        """End all requests, settle all transfers, give the memory back. Closing again does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def check(self, ask: Ask) -> None:
        """Raises ConfigError for a prompt that makes no sense, CapacityError for one that can never fit."""
        prompt_ids, params = ask.prompt_ids, ask.params
        if not prompt_ids:
            raise ConfigError("the prompt has no tokens; give at least one")
        ids = np.asarray(prompt_ids)
        if ids.min() < 0 or ids.max() >= self.info.vocabulary:
            raise ConfigError(
                f"the prompt has token ids from {ids.min()} to {ids.max()}; 0 to {self.info.vocabulary - 1} exist"
            )
        need = len(prompt_ids) + params.max_tokens
        if need > self.info.max_model_len:
            raise CapacityError(
                f"{len(prompt_ids)} prompt tokens and max_tokens={params.max_tokens} need {need} tokens, but prompt and"
                f" answer together can have {self.info.max_model_len}; shorten the prompt or ask for fewer tokens"
            )
        self._core.require_fit(need, ask.cache, ask.tenant)

    def _emitter(self, request_id: int, stream: Stream) -> Callable[[Chunk], None]:
        def emit(chunk: Chunk) -> None:
            if chunk.finish_reason is not None:
                self._places.leave(request_id)
                with self._changed:
                    self._open.pop(request_id, None)
            stream.put(chunk)

        return emit

    def _abort(self, request_id: int) -> None:
        with self._changed:
            if request_id in self._open:
                self._inbox.append(_Command(lambda: self._core.abort(request_id), _nothing))
                self._changed.notify_all()

    def _require_running(self) -> None:
        if self._failure is not None:
            raise ClosedError(f"the engine has stopped: {self._failure}; start it again")
        if self._closing:
            raise ClosedError("the engine was closed; start another")

    # The engine's thread

    def _run(self) -> None:
        try:
            while self._take_inbox():
                computed = self._core.step()
                self._publish()
                if not computed:
                    self._sleep()
            self._core.close()
        except BaseException as error:
            log.critical("the engine has stopped", exc_info=error)
            self._stop(f"{type(error).__name__}: {error}")
        finally:
            self._drop_inbox()

    def _take_inbox(self) -> bool:
        """Do what was asked for since the last step. False when the engine is to close."""
        while True:
            with self._changed:
                if not self._inbox:
                    return not self._closing
                command = self._inbox.popleft()
            command.run()

    def _sleep(self) -> None:
        if self._core.has_work:
            wait_s = _WAITING_S
        elif self._core.transfers_in_flight:
            wait_s = _SETTLING_S
        else:
            wait_s = _IDLE_S
        with self._changed:
            if not self._inbox and not self._closing:
                self._changed.wait(wait_s)

    def _publish(self) -> None:
        now_s = time.monotonic()
        if self._core.has_work and now_s - self._stats_s < _STATS_EVERY_S:
            return
        self._stats_s = now_s
        self._stats = EngineStats(self._core.stats(), self._core.cache.stats())
        self._health = self._core.cache.health()

    def _stop(self, reason: str) -> None:
        with self._changed:
            self._failure = reason
            open_requests = list(self._open.values())
        for request in open_requests:
            request.fail(f"the engine has stopped: {reason}")

    def _drop_inbox(self) -> None:
        with self._changed:
            self._closing = True
            left, self._inbox = self._inbox, deque()
        for command in left:
            command.drop()


def _nothing() -> None:
    pass
