"""Nobody is let in before the one whose turn is first, nor where there is no room for the next steps of all."""

from collections.abc import Iterable
from typing import TypeAlias

from hicache.cache import Match, UnifiedRadixCache
from hicache.engine.admission import HEADROOM_TOKENS, Budget, Claim
from hicache.engine.compute import StepExecutor
from hicache.engine.lineup import Lineup, Waiting
from hicache.engine.preemption import Preemption
from hicache.engine.request import Request
from hicache.engine.sequence import Sequence, match_for
from hicache.engine.speculation import Drafter
from hicache.engine.work import CoreOptions

LOADS_AHEAD = 2
"""For how many of those who wait the load from the host is begun before they run."""

LOOK_AGAIN_S = 0.1
"""How often it is looked whether the host has something for one of them: a prompt is matched anew each time."""

Room: TypeAlias = dict[str, int]


class Intake:
    """Lets requests in, brings retracted ones back, and begins loads of those that are next."""

    def __init__(
        self,
        cache: UnifiedRadixCache,
        executor: StepExecutor,
        options: CoreOptions,
        lineup: Lineup,
        preemption: Preemption,
        drafter: Drafter | None,
    ) -> None:
        self._cache = cache
        self._executor = executor
        self._options = options
        self._lineup = lineup
        self._preemption = preemption
        self._drafter = drafter

    def admit(self) -> Sequence | None:
        """Whoever is next, among those that run from now on; None when it has to wait.

        Where a lower priority runs, that gives way, if it helps.
        """
        one = self._lineup.next()
        if one is None or not (self._has_place or self._lineup.lower(one.request)):
            return None
        return self._come_back(one) if isinstance(one, Sequence) else self._let_in(one)

    def load_ahead(self, now_s: float) -> None:
        """Begin to load what the host has for those who are next, where there is room for that too."""
        following = [one for one in self._lineup.waiting if one.ready][:LOADS_AHEAD]
        for waiting in following:
            if self._lineup.away and self._lineup.away[0].request.turn < waiting.request.turn:
                return
            if waiting.ahead is None and now_s - waiting.looked_s >= LOOK_AGAIN_S:
                waiting.looked_s = now_s
                waiting.ahead = self._staged(waiting)
            if waiting.ahead is not None:
                waiting.ahead.start(now_s)

    def _staged(self, waiting: Waiting) -> Sequence | None:
        match = self._match(waiting)
        if match.host_tokens and not self._will_be_shared(waiting.request, match):
            ahead = [one.ahead.claim(HEADROOM_TOKENS) for one in self._lineup.waiting if one.ahead is not None]
            claim = _claim(waiting.request, match, self._cache.page_size)
            if self._budget().admits(self._cache.room(waiting.request.namespace), claim, [*self._running(), *ahead]):
                return self._new_sequence(waiting, match)
        self._cache.release(match)
        return None

    def _come_back(self, sequence: Sequence) -> Sequence | None:
        lineup, retracted = self._lineup, sequence.retracted
        if retracted is not None and retracted.lost:
            self._lineup.queue_again(sequence)
            return None
        if retracted is not None and retracted.settled:
            room = dict(self._cache.room_after(retracted))
            if not self._has_way(sequence.request, sequence.claim(HEADROOM_TOKENS), room):
                return None
        if not sequence.restore():
            lineup.stay()
            return None
        lineup.remove(sequence)
        lineup.run(sequence)
        return sequence

    def _let_in(self, waiting: Waiting) -> Sequence | None:
        request = waiting.request
        match = self._match(waiting)
        if self._will_be_shared(request, match):
            self._cache.release(match)
            return None
        if waiting.ahead is not None and waiting.ahead.computed < match.device_tokens:
            waiting.stay()
        ahead = waiting.ahead
        claim = _claim(request, match, self._cache.page_size) if ahead is None else ahead.claim(HEADROOM_TOKENS)
        if not self._has_way(request, claim, dict(self._cache.room(request.namespace))):
            self._cache.release(match)
            return None
        if ahead is None:
            sequence = self._new_sequence(waiting, match)
        else:
            self._cache.release(match)
            sequence, waiting.ahead = ahead, None
        self._lineup.waiting.remove(waiting)
        request.admitted()
        self._lineup.run(sequence)
        return sequence

    def _has_way(self, request: Request, claim: Claim, room: Room) -> bool:
        """Whether a request may run now, with what it claims and `room` for it. If not, lower ones may give way.

        One alone always may.
        """
        running, budget = self._lineup.running, self._budget()
        if not running:
            return True
        if self._has_place and budget.admits(room, claim, self._running()):
            return True
        lower = self._lineup.lower(request)
        staying = [one.claim(HEADROOM_TOKENS) for one in running if one not in lower]
        if not lower or lower[-1].returning or self._preemption.making_room():
            return False
        if not staying or budget.admits(budget.freed(room, [one.page_count for one in lower]), claim, staying):
            self._preemption.preempt(lower[-1])
        return False

    @property
    def _has_place(self) -> bool:
        return len(self._lineup.running) < self._options.max_running

    def _match(self, waiting: Waiting) -> Match:
        return match_for(self._cache, waiting.request, waiting.ticket)

    def _new_sequence(self, waiting: Waiting, match: Match) -> Sequence:
        shared = [_common(waiting.request, one.request) for one in self._lineup.waiting if one is not waiting]
        interval = self._options.snapshot_interval
        return Sequence(waiting.request, self._cache, match, self._executor, shared, interval, self._drafter)

    def _budget(self) -> Budget:
        return Budget(self._cache.coverages, self._cache.page_size, self._options.chunk_tokens)

    def _running(self) -> Iterable[Claim]:
        return [one.claim(HEADROOM_TOKENS) for one in self._lineup.running]

    def _will_be_shared(self, request: Request, match: Match) -> bool:
        """Whether a prompt that runs adds pages to the tree which `request` has in common: it waits for these."""
        if not request.cache.read:
            return False
        known = match.device_tokens + match.host_tokens
        for one in self._lineup.running:
            if one.request.cache.write and (one.missing > 1 or one.loading):
                length = min(request.length - 1, _common(request, one.request))
                if length - length % self._cache.page_size > known:
                    return True
        return False


def _claim(request: Request, match: Match, page_size: int) -> Claim:
    """What a request takes that has its match and nothing else."""
    soon = request.soon_tokens(HEADROOM_TOKENS)
    states = 2 if match.host_tokens else 1
    return Claim(match.device_tokens // page_size, request.length, soon, windows=True, states=states)


def _common(one: Request, other: Request) -> int:
    """How many tokens two requests have in common, from the first on."""
    if one.namespace != other.namespace:
        return 0
    stop = min(one.length, other.length)
    same = one.tokens(0, stop) == other.tokens(0, stop)
    return stop if same.all() else int(same.argmin())
