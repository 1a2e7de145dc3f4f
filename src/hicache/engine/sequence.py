"""A request that is being computed, with its account at the cache. `computed` tokens have their state in its slots."""

from collections.abc import Iterable

import numpy as np

from hicache.cache import Load, Match, Retracted, UnifiedRadixCache
from hicache.controller import Prefetch
from hicache.engine.admission import Claim
from hicache.engine.compute import Output, StepExecutor
from hicache.engine.request import Request
from hicache.engine.segment import Segment, StateSlots, TokenArray
from hicache.engine.snapshots import boundaries, next_stop
from hicache.engine.speculation import Drafter, Lead, Trail
from hicache.errors import InvariantError


def match_for(cache: UnifiedRadixCache, request: Request, ticket: Prefetch | None = None) -> Match:
    """What is cached of a request's tokens, as far as it wants that, with what it asks for its pages."""
    use = request.cache
    return cache.match_prefix(
        request.tokens(0, request.length),
        request.namespace,
        ticket,
        priority=request.priority if use.priority is None else use.priority,
        ttl_s=use.ttl_s,
        read=use.read,
        write=use.write,
    )


class Sequence:
    """From admission to release. Slots are only ever reached through the match.

    `shared` are token counts of the prompt that others have in common with it: where a snapshot is of use to them.
    With a `drafter`, pages are shared only as far as its state is there too.
    """

    def __init__(
        self,
        request: Request,
        cache: UnifiedRadixCache,
        match: Match,
        executor: StepExecutor,
        shared: Iterable[int] = (),
        snapshot_interval: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        self.request = request
        self.computed = 0
        self.refusals = 0
        self._cache = cache
        self._match = match
        self._executor = executor
        self._shared = (match.known_tokens, *shared)
        self._interval = snapshot_interval
        self._drafter = drafter
        self.trail = Trail()
        self._stops: tuple[int, ...] = ()
        self._resumes = False
        self._snapshot: tuple[int, StateSlots] | None = None
        self._kept: int | None = None
        self._load: Load | None = None
        self._load_s: float | None = None
        self._settled = False
        self._retracted: Retracted | None = None
        self._released = False

    @property
    def missing(self) -> int:
        """Tokens that must be computed before the next one can be chosen."""
        return self.request.length - self.computed

    @property
    def page_count(self) -> int:
        """Pages that it has slots for, or had when it was retracted."""
        return self._match.page_count

    @property
    def loading(self) -> bool:
        """Whether it waits for a load: it can be computed all the same, layer by layer as they arrive."""
        return self._load is not None and not self._settled

    @property
    def returning(self) -> bool:
        """Whether it is coming back from a retraction: it can't leave again before it has arrived."""
        return self.loading and self._retracted is not None

    @property
    def retracted(self) -> Retracted | None:
        """What it is brought back by, if it was retracted and has not arrived again."""
        return self._retracted

    def claim(self, headroom_tokens: int) -> Claim:
        """What it takes in its next steps, up to `headroom_tokens` more of its answer."""
        states = int(self._recurrent and not self._match.live_slots)
        length, soon = self.request.length, self.request.soon_tokens(headroom_tokens)
        return Claim(self._match.page_count, length, soon, states=states)

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt was computed."""
        return self.computed >= self.request.prompt_tokens

    @property
    def _recurrent(self) -> bool:
        return bool(self._executor.routes.state_pools)

    def start(self, now_s: float) -> bool:
        """Begin to load what is cached. False: ask again after the next poll.

        A load that has come short since, or is overdue, is planned again now, before more slots are taken on top of it.
        """
        if self._load is not None and not self._settled:
            self._load_s = now_s if self._load_s is None else self._load_s
            if self._load.done:
                self.settle()
            elif now_s - self._load_s > self._load.timeout_s:
                self._settle_with(self._load.give_up())
        if self._load is None:
            self._load = self._cache.load_back(self._match)
            if self._load is None:
                return False
            self._load_s = now_s
            self._settled = False
            self._resume(self._load.tokens)
            if self._load.done:
                self.settle()
        return True

    def chunk(self, budget: int) -> int:
        """How many tokens to compute next, at most `budget` (one at least): up to where a snapshot is wanted."""
        tokens = min(self.missing, max(1, budget))
        return next_stop(self._stops, self.computed, tokens) if self._recurrent else tokens

    def draft_room(self, most: int) -> int:
        """How many drafted tokens, at most `most`, may be run behind the one that is to be computed next.

        They end with the answer, and where a snapshot is wanted.
        """
        if not self._settled or self.missing != 1 or not self.request.answer_tokens:
            return 0
        room = min(most, self.request.remaining - 1)
        if self._recurrent:
            room = min(room, self._cache.page_size - self.computed % self._cache.page_size - 1)
        return room

    def reserve(self, tokens: int) -> bool:
        """Have slots for the next `tokens` tokens. False, with nothing taken, when the device has none to give.

        Where all state covers the whole prefix, slots for the whole prompt are taken at once, so that what has begun
        can go on.
        """
        stop = self.computed + tokens
        routes = self._executor.routes
        if not routes.sees_less and not self._recurrent:
            return self._have(max(stop, self.request.length))
        if self._snapshot is not None and self._snapshot[0] == stop:
            return self._have(stop)
        missing = stop - self._match.length_tokens
        if self._recurrent and missing >= 0 and self._wants_snapshot(stop):
            granted = self._cache.allocate(self._match, missing, checkpoint=True)
            if granted is not None:
                slots = {pool: int(granted[pool][-1]) for pool in routes.state_pools if pool in granted}
                self._snapshot = (stop, slots) if slots else None
                return True
        return self._have(stop)

    def segment(self, tokens: int, drafts: TokenArray | None = None) -> Segment:
        """The next `tokens` tokens to compute, and tokens that may follow them: then the state after is not kept."""
        routes = self._executor.routes
        live = self._match.live_slots
        known = self.request.tokens(self.computed, self.computed + tokens)
        guessed = 0 if drafts is None else len(drafts)
        return Segment(
            known if drafts is None else np.concatenate((known, drafts)),
            self.computed,
            {pool: self._match.slots(pool) for pool in routes.token_pools},
            state_from=self._snapshot_here() if self._resumes else live if self.computed else None,
            state_to=None if guessed else live,
            logit_rows=1 + guessed,
        )

    def lead(self, drafter: Drafter) -> Lead:
        """What a drafter may know of it."""
        request = self.request
        slots = {drafter.source: self._match.slots(drafter.source)}
        return Lead(request.tokens(0, request.length), self.computed, slots, self.trail, request.finished)

    @property
    def speculates(self) -> bool:
        """Whether it still has a drafter."""
        return self._drafter is not None

    @property
    def unsettled_page(self) -> bool:
        """Whether a page was filled that can't be shared until the drafter has come as far."""
        page = self._cache.page_size
        return self.computed // page > self.trail.ready // page

    def wait(self, layer: int) -> None:
        """Block until what was loaded of `layer` is there."""
        if self._load is not None and not self._settled:
            self._load.wait(layer)

    def settle(self) -> bool:
        """After a step: whether what it ran on was really there. If not, the step is void and `start` plans again."""
        return self._settled or self._load is None or self._settle_with(self._load.result())

    def _settle_with(self, good: int) -> bool:
        if self._load is not None and good < self._load.tokens:
            self._load = None
            self._resume(0)
            if self._retracted is not None:
                self._begin_again()
            return False
        self._settled = True
        self._retracted = None
        self.request.use_cache(self._match.cached_tokens)
        return True

    def keep_state(self, output: Output) -> None:
        """All that was run, drafts included, has become part of the sequence: so does the state after it."""
        output.keep_state(self._match.live_slots)

    def advance(self, tokens: int) -> None:
        """`tokens` more have been computed: where a snapshot was wanted there, it is taken."""
        self.computed += tokens
        self._resumes = False
        if self._snapshot is not None and self._snapshot[0] == self.computed:
            self._take_snapshot(self._snapshot[1])
            self._snapshot = None

    def share(self) -> None:
        """Put the full pages computed so far, and the snapshots taken, into the tree."""
        self._share(snapshots=True)

    def share_behind(self) -> None:
        """While an answer grows: share full pages where that lets pages go which no token sees any more.

        Also the prompt's last ones, if they had to wait for what a draft looks ahead to. The newest snapshot stays
        here, to be dropped for the next one: an answer leaves one only.
        """
        page, shared = self._cache.page_size, self._match.shared_tokens
        late = self._lookahead and shared + page <= self.request.prompt_tokens
        if (self._executor.routes.sees_less or late) and self._final // page > shared // page:
            self._share(snapshots=False)

    def retract(self) -> bool:
        """Leave the device with all that was computed. False: not now, or neither host nor storage can take it."""
        if not self._settled:
            return False
        if self._snapshot is not None:
            self._cache.drop_checkpoint(self._match, self._snapshot[0] // self._cache.page_size)
            self._snapshot = None
        self._retracted = self._cache.retraction_backup(self._match)
        return self._retracted is not None

    @property
    def leaving(self) -> bool:
        """Whether it was retracted and its device slots are not free yet."""
        return self._retracted is not None and not self._retracted.settled

    def restore(self) -> bool:
        """Come back to the device, to go on where it was. False: ask again after the next poll."""
        if self._retracted is None:
            raise InvariantError(f"request {self.request.id} comes back, but it never left")
        self._load = self._cache.retraction_restore(self._retracted)
        self._load_s = None
        if self._load is None:
            return False
        self._settled = False
        return True

    def give_up_drafts(self) -> bool:
        """Share pages that wait for a drafter which has failed, where only that lets pages behind a window go.

        What it left of them may spoil later guesses, never a token. False if no page waits, or nothing would go.
        """
        if not (self.speculates and self.unsettled_page and self._executor.routes.sees_less) or self._lookahead:
            return False
        self._drafter = None
        self._share(snapshots=False)
        return True

    def release(self) -> None:
        """Give everything back. Once."""
        if not self._released:
            self._released = True
            self._cache.release(self._match)

    @property
    def _lookahead(self) -> int:
        return self._drafter.lookahead if self._drafter is not None else 0

    @property
    def _final(self) -> int:
        """Tokens whose state is in the slots, the drafter's included."""
        return self.computed if self._drafter is None else min(self.computed, self.trail.ready)

    def _share(self, snapshots: bool) -> None:
        if self._settled:
            tokens = self.request.tokens(0, self._final + self._lookahead)
            self._match = self._cache.insert(self._match, tokens, checkpoints=snapshots)

    def _resume(self, tokens: int) -> None:
        """Go on from `tokens` tokens that are, or are being, loaded: the next step starts with the snapshot there."""
        page = self._cache.page_size
        self.computed = tokens
        self._snapshot = self._kept = None
        self._resumes = tokens > 0
        self.trail = Trail(tokens)
        if self._recurrent and self.request.cache.write:
            self._stops = boundaries(page, tokens, self.request.length, self._interval, self._shared)

    def _begin_again(self) -> None:
        """What was kept of it is lost: match what is still cached, as any other request would."""
        self._retracted = None
        self._cache.release(self._match)
        self._match = match_for(self._cache, self.request)

    def _snapshot_here(self) -> StateSlots | None:
        """Where the recurrent state after what is computed was kept; None for a model without."""
        page = self.computed // self._cache.page_size - 1
        return {pool: int(self._match.slots(pool)[page]) for pool in self._executor.routes.state_pools} or None

    def _wants_snapshot(self, stop: int) -> bool:
        if not self.request.cache.write:
            return False
        if stop >= self.request.length and self.request.answer_tokens:
            return stop % self._cache.page_size == 0
        return stop in self._stops

    def _take_snapshot(self, slots: StateSlots) -> None:
        self._executor.copy_state(self._match.live_slots, slots)
        if not self.decoding:
            return
        if self._kept is not None:
            self._cache.drop_checkpoint(self._match, self._kept // self._cache.page_size)
        self._kept = self.computed

    def _have(self, tokens: int) -> bool:
        match = self._match
        enough = match.page_count * self._cache.page_size >= tokens and (match.live_slots or not self._recurrent)
        return bool(enough) or self._cache.allocate(match, max(0, tokens - match.length_tokens)) is not None
