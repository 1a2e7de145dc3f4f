"""What can happen to a cache, one call each: the state machine and the seeded walks below choose among them."""

import random

from hicache.cache import Flush, Load, Match, Retracted
from hicache.controller import Prefetch
from hicache.errors import InUseError
from hicache.storage import PageStore
from hicache.storage.memory import MemoryBackend
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.units import Tier
from tests.world import KINDS, PAGE, World, tokens

RATES = (
    FaultRates(start=1.0),
    FaultRates(start=0.4),
    FaultRates(start=0.4, fail=0.1, partial=0.2),
    FaultRates(start=0.3, fail=0.1, partial=0.1, lose=0.05),
)
LENGTHS = (1, PAGE, PAGE + 1, 3 * PAGE + 2, 4 * PAGE, 5 * PAGE + 1, 6 * PAGE + 1)
CHUNKS = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE)
WINDOW_RATIOS = (1.0, 0.01)
"""Windowed pools as large as others, or of a window and two pages."""
MOST_PAGES = 7
MOST_REQUESTS = 4


def prompt_of(forks: list[int], length: int) -> bytes:
    """A prompt whose page i differs from others' only by `forks[i]`."""
    return tokens(*[forks[page] if place == 0 else 7 for page in range(MOST_PAGES) for place in range(PAGE)][:length])


def answer(prompt: bytes) -> bytes:
    """The prompt and the answer to it, of `MOST_PAGES` pages in all: longer prompts may have asked for the same."""
    return prompt + prompt_of([0] * MOST_PAGES, MOST_PAGES * PAGE)[len(prompt) :]


class Shelf(MemoryBackend):
    """A memory store that outlives its attachments, as one on disk does."""

    def close(self) -> None:
        """Keeps everything."""


class Request:
    """A request between two calls."""

    def __init__(self, prompt: bytes, match: Match) -> None:
        self.prompt = prompt
        self.match = match
        self.load: Load | None = None
        self.retracted: Retracted | None = None
        self.back = False
        """Its load brings it back from a retraction."""
        self.computed = b""
        """What it has computed and what that goes on from; nothing before it has begun."""


class Driver:
    """Requests come, load, compute, insert and abort in any order, while transfers are delayed, fail and get lost."""

    def __init__(
        self,
        seed: int,
        rates: FaultRates,
        model: str,
        policy: str,
        device_pages: int,
        host_pages: int,
        window_ratio: float,
    ) -> None:
        self.requests: list[Request] = []
        self.tickets: list[tuple[bytes, Prefetch]] = []
        self.flushes: list[Flush] = []
        self.backend = Shelf()
        self.executor = SimulatedExecutor(seed, rates)
        self.world = World(
            model=KINDS[model],
            device_pages=device_pages,
            host_pages=host_pages,
            executor=self.executor,
            backend=self.backend,
            write_policy=policy,
            window_ratio=window_ratio,
        )
        self.cache = self.world.cache

    @classmethod
    def seeded(cls, seed: int) -> "Driver":
        """A driver whose whole set-up follows from a seed."""
        dice = random.Random(seed)
        return cls(
            seed,
            dice.choice(RATES),
            dice.choice(sorted(KINDS)),
            dice.choice(["write_through", "write_back"]),
            dice.randint(6, 16),
            dice.randint(4, 24),
            dice.choice(WINDOW_RATIOS),
        )

    def arrive(self, prompt: bytes, ticket: Prefetch | None = None) -> None:
        if len(self.requests) < MOST_REQUESTS:
            match = self.cache.match_prefix(prompt, self.world.namespace, ticket)
            self.requests.append(Request(prompt, match))

    def prefetch(self, prompt: bytes, timeout_s: float) -> None:
        self.tickets.append((prompt, self.cache.prefetch(prompt, self.world.namespace, timeout_s)))

    def arrive_with_ticket(self, index: int, *, cancel: bool) -> None:
        prompt, ticket = self.tickets.pop(index)
        if cancel:
            self.cache.cancel_prefetch(ticket)
        self.arrive(prompt, ticket)

    def load(self, request: Request) -> None:
        if (
            not request.computed
            and not request.match.loading
            and request.retracted is None
            and not self._ended(request)
        ):
            request.load = self.cache.load_back(request.match)

    def result(self, request: Request) -> None:
        """How a load ended. A request of which something was lost is released: it would come again."""
        load, request.load = request.load, None
        if load is None:
            return
        good = load.result()
        assert good <= load.tokens
        if request.back and good < load.tokens:
            assert good == 0
            self.release(request)
        else:
            self.world.check(request.match)
        request.back = False

    def compute(self, request: Request) -> None:
        """All of the prompt that is left, with a snapshot at its end."""
        self.grow(request, len(request.prompt) // 4, checkpoint=True, checkpoints=True)

    def grow(self, request: Request, length: int, *, checkpoint: bool, checkpoints: bool) -> None:
        """Compute up to `length` tokens of prompt and answer, if that is more than there is, and share it."""
        match = request.match
        if match.loading or self._ended(request):
            return
        self.world.check(match)
        text = answer(request.prompt)[: 4 * max(length, match.length_tokens)]
        if self.cache.allocate(match, len(text) // 4 - match.length_tokens, checkpoint=checkpoint) is None:
            return
        request.computed = text
        self.world.compute(match, text)
        self.world.check(match)
        request.match = self.cache.insert(match, text, checkpoints=checkpoints)
        self.world.check(request.match)

    def go_on(self, request: Request, tokens: int, *, checkpoint: bool, checkpoints: bool) -> None:
        """A chunk of the prompt, or a part of the answer."""
        length = min(request.match.length_tokens + tokens, MOST_PAGES * PAGE)
        self.grow(request, length, checkpoint=checkpoint, checkpoints=checkpoints)

    def reserve(self, request: Request, tokens: int, *, checkpoint: bool) -> None:
        """Slots ahead of computing, maybe while a load is under way."""
        if request.back or request.retracted is not None:
            return
        room = MOST_PAGES * PAGE - request.match.length_tokens
        lent = self.cache.allocate(request.match, min(tokens, room), checkpoint=checkpoint)
        if lent is not None and request.computed:
            self.world.compute(request.match, request.computed)

    def drop_checkpoint(self, request: Request, page: int) -> None:
        if not request.back and request.retracted is None:
            self.cache.drop_checkpoint(request.match, page)

    def _ended(self, request: Request) -> bool:
        """Whether a request is away or was lost, or is of no use to go on with for another reason."""
        if request.retracted is None and not request.match.loading:
            self.result(request)
        return request.retracted is not None or request not in self.requests

    def retract(self, request: Request) -> None:
        """A request that must make room leaves the device, if it can."""
        if request.match.loading or self._ended(request):
            return
        before = self.world.cache.stats()
        request.retracted = self.cache.retraction_backup(request.match)
        if request.retracted is None:
            after = self.world.cache.stats()
            assert (after.pins, after.retracted) == (before.pins, before.retracted)

    def restore(self, request: Request) -> None:
        """A request that is away comes back, if there is room."""
        if request.retracted is None:
            return
        length, cached = request.match.length_tokens, request.match.cached_tokens
        load = self.cache.retraction_restore(request.retracted)
        if load is not None:
            assert (request.match.length_tokens, request.match.cached_tokens) == (length, cached)
            request.load, request.retracted, request.back = load, None, True

    def discard(self, request: Request) -> None:
        """A request that is away is aborted."""
        if request.retracted is not None:
            self.requests.remove(request)
            self.cache.retraction_discard(request.retracted)

    def release(self, request: Request) -> None:
        self.requests.remove(request)
        self.cache.release(request.match)

    def poll(self) -> None:
        self.cache.poll()

    def wait(self, seconds: float) -> None:
        self.world.clock.now_s += seconds
        self.cache.poll()

    def evict(self, tier: Tier, pages: int | None) -> None:
        self.cache.evict(tier, pages)

    def reattach(self, *, empty: bool) -> None:
        self.cache.detach_storage_backend()
        if empty:
            self.backend = Shelf()
        self.cache.attach_storage_backend(PageStore(self.backend))

    def flush(self, *, force: bool, everything: bool) -> None:
        """All that was computed so far is void: what is computed from now on has other bytes."""
        running = [request for request in self.requests if not request.match.flushed]
        try:
            flush = self.cache.flush(None if everything else self.world.namespace, force=force)
        except InUseError:
            assert running
            assert not force
            return
        assert force or not running
        for request in running:
            self.world.born[request.match] = self.world.generation
            assert request.match.flushed
        self.world.generation += 1
        if self.cache.controller.storage is None:
            self.backend = Shelf()  # a store that is attached later is used as it is
        self.flushes.append(flush)

    def forget_and_serve(self, prompt: bytes, *, stored: bool) -> None:
        """What a busy server does to a prompt that comes again later."""
        for tier in (Tier.DEVICE, Tier.HOST) if stored else (Tier.DEVICE,):
            self.cache.evict(tier)
            for _ in range(5):
                self.cache.poll()
        ticket = self.cache.prefetch(prompt, self.world.namespace)
        for _ in range(20):
            self.cache.poll()
        self.world.serve(prompt, ticket)

    def flush_under_way(self, prompt: bytes, polls: int) -> None:
        """A prompt is on its way from storage when everything is flushed, and comes again at once."""
        for tier in (Tier.DEVICE, Tier.HOST):
            self.cache.evict(tier)
        ticket = self.cache.prefetch(prompt, self.world.namespace)
        for _ in range(polls):
            self.cache.poll()
        self.flush(force=True, everything=True)
        again = self.cache.prefetch(prompt, self.world.namespace)
        for _ in range(10):
            self.cache.poll()
        self.world.serve(prompt, ticket)
        self.world.serve(prompt, again)

    def abort_in_load(self, prompt: bytes, other: bytes) -> None:
        """A request goes while its pages load; another takes what memory it can get before they have come."""
        self.cache.evict(Tier.DEVICE)
        match = self.cache.match_prefix(prompt, self.world.namespace)
        self.cache.load_back(match)
        self.cache.release(match)
        self.cache.evict(Tier.HOST)
        match = self.cache.match_prefix(other, self.world.namespace)
        if self.cache.allocate(match, len(other) // 4 - match.length_tokens, checkpoint=True) is not None:
            self.world.compute(match, other)
            self.cache.insert(match, other)
        self.cache.release(match)

    def check(self) -> None:
        """What holds after every call."""
        self.cache.audit()
        stats = self.cache.stats()
        assert sum(stats.hit_tokens.values()) <= stats.lookup_tokens
        for request in self.requests:
            assert sum(request.match.cached_tokens.values()) <= max(0, len(request.prompt) // 4 - 1)
            if request.computed and request.load is None and request.retracted is None:
                self.world.check(request.match)

    def finish(self) -> None:
        """What holds in the end: nothing is pinned, lent or in flight, and everything could be had."""
        for request in self.requests:
            self.cache.release(request.match)
        self.requests.clear()
        self.world.clock.now_s += 1000.0
        self.world.settle()
        self.cache.audit()
        if not self.executor.lost:
            assert all(flush.done for flush in self.flushes)
            self.world.idle()
            for pool in self.cache.stats().pools:
                assert self.world.cache.controller.state.room(pool.pool, pool.tier) == pool.slots, pool
        self.cache.close()
        assert all(ticket.done for _, ticket in self.tickets)


def walk(seed: int, steps: int) -> Driver:
    """A run that follows from its seed: what a server goes through, in no particular order."""
    dice = random.Random(seed)
    driver = Driver.seeded(seed)
    for _ in range(steps):
        step(driver, dice)
        driver.check()
    driver.finish()
    return driver


WEIGHTS = {
    "arrive": 10,
    "prefetch": 5,
    "ticket": 5,
    "compute": 20,
    "grow": 35,
    "reserve": 3,
    "drop": 2,
    "release": 5,
    "retract": 12,
    "restore": 20,
    "discard": 1,
    "poll": 12,
    "wait": 1,
    "evict": 6,
    "serve": 25,
    "abort": 8,
    "reattach": 0.5,
    "detach": 0.3,
    "flush": 1,
    "flush under way": 2,
}
"""How often each call is chosen."""


def step(driver: Driver, dice: random.Random) -> None:
    """One call, chosen so that prompts come again while their pages are in every tier."""
    forks = [int(page in (1, 4) and dice.random() < 0.25) for page in range(7)]
    prompt = prompt_of(forks, dice.choice(LENGTHS))
    calls = {
        "arrive": lambda: driver.arrive(prompt),
        "prefetch": lambda: driver.prefetch(prompt, dice.choice([0.0, 5.0])),
        "poll": driver.poll,
        "wait": lambda: driver.wait(dice.choice([1.0, 10.0])),
        "evict": lambda: driver.evict(dice.choice([Tier.DEVICE, Tier.HOST]), dice.choice([None, 1, 2, 5])),
        "serve": lambda: driver.forget_and_serve(prompt, stored=dice.random() < 0.3),
        "abort": lambda: driver.abort_in_load(prompt, prompt_of([1] * 7, dice.choice(LENGTHS))),
        "reattach": lambda: driver.reattach(empty=dice.random() < 0.5),
        "detach": driver.cache.detach_storage_backend,
        "flush under way": lambda: driver.flush_under_way(prompt, dice.randint(0, 3)),
        "flush": lambda: driver.flush(force=dice.random() < 0.7, everything=dice.random() < 0.5),
    }
    if driver.tickets:
        index, cancel = dice.randrange(len(driver.tickets)), dice.random() < 0.2
        calls["ticket"] = lambda: driver.arrive_with_ticket(index, cancel=cancel)
    if driver.requests:
        request = dice.choice(driver.requests)
        calls["compute"] = lambda: dice.choice([driver.load, driver.result, driver.compute, driver.compute])(request)
        calls["grow"] = lambda: driver.go_on(
            request, dice.choice(CHUNKS), checkpoint=dice.random() < 0.6, checkpoints=dice.random() < 0.6
        )
        calls["reserve"] = lambda: driver.reserve(request, dice.choice(CHUNKS), checkpoint=dice.random() < 0.6)
        calls["drop"] = lambda: driver.drop_checkpoint(request, dice.randint(1, MOST_PAGES))
        calls["release"] = lambda: driver.release(request)
        calls["retract"] = lambda: driver.retract(request)
        calls["restore"] = lambda: driver.restore(request)
        calls["discard"] = lambda: driver.discard(request)
    calls[dice.choices(list(calls), [WEIGHTS[kind] for kind in calls])[0]]()
