"""The scheduler: one thread owns it, one call is one step; every request ends, whatever fails or is in short supply."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from hicache.cache import UnifiedRadixCache
from hicache.engine.compute import Output, StepExecutor
from hicache.engine.drafting import Drafting
from hicache.engine.intake import Intake
from hicache.engine.lineup import Lineup, Waiting
from hicache.engine.pace import Pace
from hicache.engine.planner import Planner
from hicache.engine.preemption import Preemption
from hicache.engine.request import Request
from hicache.engine.sequence import Sequence
from hicache.engine.speculation import Drafter, choose, no_tokens
from hicache.engine.types import CACHED, CacheUse
from hicache.engine.work import CoreOptions, CoreStats, Done, Work
from hicache.errors import CapacityError, InvariantError
from hicache.keys import Namespace
from hicache.storage import BreakerOptions

log = logging.getLogger("hicache")

T = TypeVar("T")


class EngineCore:
    """Plans and runs steps over one cache and one executor, with the guesses of a drafter if there is one."""

    def __init__(
        self,
        cache: UnifiedRadixCache,
        executor: StepExecutor,
        options: CoreOptions,
        clock: Callable[[], float] = time.monotonic,
        drafter: Drafter | None = None,
    ) -> None:
        self.cache = cache
        self._executor = executor
        self._drafting = Drafting(drafter)
        self._options = options
        self._clock = clock
        self._counts = CoreStats()
        self._progress_s = clock()
        self._pace = Pace(cache)
        self.lineup = Lineup(options.priority_ageing_s)
        self.preemption = Preemption(self.lineup, options, self._counts, clock, lambda: cache.in_flight)
        intake = Intake(cache, executor, options, self.lineup, self.preemption, drafter)
        chunk_tokens = options.chunk_tokens
        self.planner = Planner(self.lineup, intake, self.preemption, self._drafting, chunk_tokens, clock)

    @property
    def breaker(self) -> BreakerOptions:
        """When a store that is attached from now on is left alone."""
        return self._options.breaker

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.lineup.waiting or self.lineup.running or self.lineup.away)

    @property
    def transfers_in_flight(self) -> int:
        """Copies between tiers that `step` must settle, with requests or without."""
        return self.cache.in_flight

    def stats(self) -> CoreStats:
        """The numbers now."""
        lineup = self.lineup
        running, waiting, away = len(lineup.running), len(lineup.waiting), len(lineup.away)
        return replace(self._counts, running=running, waiting=waiting, retracted=away)

    def require_fit(self, tokens: int, use: CacheUse = CACHED, tenant: str = "") -> None:
        """Raises CapacityError when prompt and answer of `tokens` tokens can never fit. Any thread may ask."""
        # Pages that are not shared go with their request, and none before, also those that no window sees any more.
        chunk_tokens = self._options.chunk_tokens if use.write else None
        # The last token of an answer is never run through the model.
        self.cache.require_fit(max(1, tokens - 1), chunk_tokens, tenant=tenant)

    def add(self, request: Request) -> None:
        """Queue a request; what storage has of its prompt is fetched meanwhile. One that can never fit fails here."""
        try:
            tokens = request.prompt_tokens + request.params.max_tokens
            self.require_fit(tokens, request.cache, request.namespace.tenant)
        except CapacityError as error:
            request.fail(str(error))
            self._counts.failed_requests += 1
            return
        ticket = None
        if request.cache.read:
            ticket = self.cache.prefetch(request.tokens(0, request.length), request.namespace)
        self.lineup.come(request, self._clock())
        self.lineup.wait(Waiting(request, ticket))
        self._progress_s = self._clock()

    def abort(self, request_id: int) -> None:
        """End a request at whatever point it is. Harmless when it has ended already."""
        lineup = self.lineup
        for waiting in [one for one in lineup.waiting if one.request.id == request_id]:
            lineup.waiting.remove(waiting)
            waiting.stay()
            if waiting.ticket is not None:
                self.cache.cancel_prefetch(waiting.ticket)
            waiting.request.abort()
            self._counts.aborted_requests += 1
        for sequence in [one for one in (*lineup.away, *lineup.running) if one.request.id == request_id]:
            if sequence in lineup.running:
                sequence.share()
            self._leave(sequence)
            sequence.request.abort()
            self._counts.aborted_requests += 1

    def abort_all(self) -> None:
        """End every request."""
        for request in list(self.lineup.everyone()):
            self.abort(request.id)

    @property
    def admitted(self) -> int:
        """How many requests have begun and not ended."""
        return len(self.lineup.running) + len(self.lineup.away)

    def begin_again(self, namespace_of: Callable[[Namespace], Namespace]) -> None:
        """Every request begins anew, with what it has of its answer, in another namespace. Nothing computed is kept."""
        lineup = self.lineup
        everyone = list(lineup.everyone())
        for sequence in (*lineup.running, *lineup.away):
            self._leave(sequence)
        waiting, lineup.waiting = lineup.waiting, []
        for one in waiting:
            one.stay()
            if one.ticket is not None:
                self.cache.cancel_prefetch(one.ticket)
        for request in everyone:
            request.namespace = namespace_of(request.namespace)
            lineup.wait(Waiting(request, None))

    def step(self) -> bool:
        """Settle what has arrived, then compute once. False when nothing could be computed now."""
        self.cache.poll()
        work = self.planner.plan()
        if not work:
            self._check_progress()
            return False
        self._progress_s = begun_s = self._clock()
        before = self._counts.prefill_tokens
        self._finish_step(self._run(self._propose(work)))
        self._pace.step(self._counts.prefill_tokens - before, self._clock() - begun_s)
        self._counts.steps += 1
        return True

    def close(self) -> None:
        """End every request and close the cache."""
        self.abort_all()
        self.cache.close()

    # Computing

    def _propose(self, work: list[Work]) -> list[Work]:
        """The same parts with guesses, where there is room."""
        drafts = self._drafting.propose({one.sequence: one.room for one in work if one.room})
        return [replace(one, drafts=drafts.get(one.sequence, no_tokens())) for one in work]

    def _run(self, work: list[Work]) -> list[tuple[Work, Output]]:
        """What came of each part of the step. If it fails, parts run alone, so that only the bad one ends."""
        try:
            segments = [one.sequence.segment(one.tokens, one.drafts) for one in work]
            outputs = self._executor.run(segments, lambda layer: self._wait(work, layer))
            return list(zip(work, outputs, strict=True))
        except InvariantError:
            raise
        except Exception as error:
            if len(work) > 1:
                log.exception("a step with %d requests failed; they are run one by one", len(work))
                return [pair for one in work for pair in self._run([one])]
            log.exception("request %d failed", work[0].sequence.request.id)
            self._fail(work[0].sequence, error)
            return []

    def _finish_step(self, outputs: list[tuple[Work, Output]]) -> None:
        chosen = [self._guard(one.sequence, partial(self._choose, one, output)) for one, output in outputs]
        kept = self._keep_states([one for one in chosen if one is not None])
        advanced = [one for one in kept if self._guard(one.sequence, partial(self._advance, one))]
        self._drafting.settle(one.sequence for one in advanced if one.prefill or one.sequence.unsettled_page)
        for one in advanced:
            self._guard(one.sequence, partial(self._share, one))

    def _choose(self, one: Work, output: Output) -> Done | None:
        """The sequence's next tokens, if all before them are computed. None: what the step ran on was not there."""
        sequence, request = one.sequence, one.sequence.request
        if not sequence.settle():
            self._counts.void_steps += 1
            return None
        prefill = one.tokens > 1 or request.answer_tokens == 0
        tokens = one.tokens
        if sequence.missing == tokens:
            self._counts.drafted_tokens += len(one.drafts)
            self._counts.accepted_tokens += choose(request, output.logits, one.drafts, self._clock())
            tokens = request.length - 1 - sequence.computed
        return Done(one, output, tokens, prefill)

    def _keep_states(self, done: list[Done]) -> list[Done]:
        """Recurrent state after a wrong draft is of no use: what was right is computed again, from the state before."""
        if not self._executor.routes.state_pools:
            return done
        again = []
        for one in [one for one in done if len(one.work.drafts)]:
            if one.tokens == 1 + len(one.work.drafts):
                one.sequence.keep_state(one.output)
            elif not one.sequence.request.finished:
                again.append(Work(one.sequence, one.tokens))
        if again:
            self._run(again)
        return [one for one in done if one.sequence in self.lineup.running]

    def _advance(self, one: Done) -> bool:
        one.sequence.advance(one.tokens)
        if one.prefill:
            self._counts.prefill_tokens += one.tokens
        else:
            self._counts.decode_tokens += one.tokens
        self._drafting.follow(one.sequence, one.output.hidden[: one.tokens])
        return True

    def _share(self, one: Done) -> None:
        sequence, request = one.sequence, one.sequence.request
        if one.prefill:
            sequence.share()
        else:
            sequence.share_behind()
        if request.finished:
            sequence.share()
            self._leave(sequence)
            self._counts.finished_requests += 1

    def _guard(self, sequence: Sequence, action: Callable[[], T]) -> T | None:
        """What `action` returns; None if it fails, with the request, and with no other."""
        try:
            return action()
        except InvariantError:
            raise
        except Exception as error:
            log.exception("request %d failed", sequence.request.id)
            self._fail(sequence, error)
            return None

    def _wait(self, work: list[Work], layer: int) -> None:
        for one in work:
            one.sequence.wait(layer)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._leave(sequence)
        sequence.request.fail(f"{type(error).__name__}: {error}")
        self._counts.failed_requests += 1

    def _leave(self, sequence: Sequence) -> None:
        self.lineup.remove(sequence)
        sequence.release()

    def _check_progress(self) -> None:
        """The last way out: a request that nothing else keeps from running, and that still can't."""
        stuck_s = self._clock() - self._progress_s
        stuck = (*self.lineup.running, *self.lineup.away)
        if not stuck:
            self._progress_s = self._clock()
        elif stuck_s > self._options.stall_timeout_s:
            self._fail(stuck[0], TimeoutError(f"no device memory came free in {stuck_s:.0f} s"))
            self._progress_s = self._clock()
