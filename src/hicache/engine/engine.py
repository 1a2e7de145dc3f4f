"""The engine behind a door that any thread may use: one thread of its own runs the core, and nobody else touches it."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from hicache.cache import CacheStats
from hicache.engine.core import EngineCore
from hicache.engine.model import Tokenizer
from hicache.engine.places import Places
from hicache.engine.request import Request
from hicache.engine.stream import Stream
from hicache.engine.types import Ask, Chunk, SamplingParams
from hicache.engine.work import CoreStats
from hicache.errors import CapacityError, ClosedError, ConfigError, InvariantError
from hicache.keys import Namespace

log = logging.getLogger("hicache")

T = TypeVar("T")

_WAITING_S = 0.001
"""How long to wait when requests wait for transfers."""
_SETTLING_S = 0.005
"""How long to wait when only transfers are under way."""
_IDLE_S = 0.5
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

    def __init__(self, core: EngineCore, tokenizer: Tokenizer, info: EngineInfo, max_waiting: int) -> None:
        self.tokenizer = tokenizer
        self.info = info
        self._core = core
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

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, salt: str = "") -> Stream:
        """Start a request; `salt` keeps its pages apart from those of other tenants. Raises as `submit_all` does."""
        return self.submit_all([Ask(prompt_ids, params, salt)])[0]

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
                self._inbox.append(_Command(partial(self._core.add, request), request.abort))
            self._changed.notify_all()
        return [stream for _, stream in started]

    def _new_request(self, ask: Ask, submitted_s: float) -> tuple[Request, Stream]:
        request_id = next(self._ids)
        stream = Stream(abort=lambda: self._abort(request_id))
        request = Request(
            request_id,
            ask.prompt_ids,
            ask.params,
            self.info.namespace.with_salt(ask.salt) if ask.salt else self.info.namespace,
            self.tokenizer,
            self.info.end_of_text,
            self._emitter(request_id, stream),
            submitted_s,
            partial(self._places.leave, request_id),
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
        self._core.require_fit(need)

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
