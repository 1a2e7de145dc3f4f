"""The controller under seeded faults, against the plainest model: the bytes of a page follow from its tokens."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache.cache import Load, Match
from hicache.controller import Prefetch
from hicache.storage import PageStore
from hicache.storage.memory import MemoryBackend
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.units import Tier
from tests.world import MODELS, PAGE, World, tokens

RATES = [
    FaultRates(start=1.0),
    FaultRates(start=0.4),
    FaultRates(start=0.4, fail=0.2, partial=0.2),
    FaultRates(start=0.3, fail=0.1, partial=0.1, lose=0.05),
]

PROMPTS = st.builds(
    lambda forks, length: tokens(
        *[forks[page] if place == 0 else 7 for page in range(7) for place in range(PAGE)][:length]
    ),
    st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=7, max_size=7),
    st.sampled_from([1, PAGE, PAGE + 1, 3 * PAGE + 2, 4 * PAGE, 5 * PAGE + 1, 6 * PAGE + 1]),
)


class Shelf(MemoryBackend):
    """A memory store that outlives its attachments, as one on disk does."""

    def close(self) -> None:
        """Keeps everything."""


class Request:
    """A request between two calls of the machine."""

    def __init__(self, prompt: bytes, match: Match) -> None:
        self.prompt = prompt
        self.match = match
        self.load: Load | None = None
        self.computed = False


class ControllerMachine(RuleBasedStateMachine):
    """Requests come, load, compute, insert, abort, in any order, while transfers are delayed, fail and get lost."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.tickets: list[tuple[bytes, Prefetch]] = []
        self.world: World | None = None

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        rates=st.sampled_from(RATES),
        model=st.sampled_from(sorted(MODELS)),
        policy=st.sampled_from(["write_through", "write_back"]),
        device_pages=st.integers(6, 20),
        host_pages=st.integers(3, 30),
    )
    def build(self, seed, rates, model, policy, device_pages, host_pages) -> None:
        self.rates = rates
        self.backend = Shelf()
        self.world = World(
            model=MODELS[model],
            device_pages=device_pages,
            host_pages=host_pages,
            executor=SimulatedExecutor(seed, rates),
            backend=self.backend,
            write_policy=policy,
        )

    @property
    def cache(self):
        return self.world.cache

    @rule(prompt=PROMPTS)
    def arrive(self, prompt) -> None:
        if len(self.requests) < 4:
            self.requests.append(Request(prompt, self.cache.match_prefix(prompt, self.world.namespace)))

    @rule(prompt=PROMPTS, timeout_s=st.sampled_from([0.0, 5.0]))
    def prefetch(self, prompt, timeout_s) -> None:
        self.tickets.append((prompt, self.cache.prefetch(prompt, self.world.namespace, timeout_s)))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), cancel=st.booleans())
    def arrive_with_ticket(self, data, cancel) -> None:
        prompt, ticket = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        if cancel:
            self.cache.cancel_prefetch(ticket)
        if len(self.requests) < 4:
            match = self.cache.match_prefix(prompt, self.world.namespace, ticket)
            self.requests.append(Request(prompt, match))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def load(self, data) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if not request.computed and not request.match.loading:
            request.load = self.cache.load_back(request.match)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def result(self, data) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if request.load is not None:
            planned = request.load.tokens
            assert request.load.result() <= planned
            request.load = None
            self.world.check(request.match)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def compute(self, data) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if request.match.loading:
            return
        self.world.check(request.match)
        missing = len(request.prompt) // 4 - request.match.length_tokens
        if missing > 0 and self.cache.allocate(request.match, missing) is None:
            return
        request.computed = True
        self.world.compute(request.match, request.prompt)
        request.match = self.cache.insert(request.match, request.prompt)
        self.world.check(request.match)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.cache.release(request.match)

    @rule()
    def poll(self) -> None:
        self.cache.poll()

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds) -> None:
        self.world.clock.now_s += seconds
        self.cache.poll()

    @rule(tier=st.sampled_from([Tier.DEVICE, Tier.HOST]), pages=st.one_of(st.none(), st.integers(0, 10)))
    def evict(self, tier, pages) -> None:
        self.cache.evict(tier, pages)

    @rule(dice=st.integers(0, 4), empty=st.booleans())
    def reattach(self, dice, empty) -> None:
        if dice:
            return
        self.cache.detach_storage_backend()
        if empty:
            self.backend = Shelf()
        self.cache.attach_storage_backend(PageStore(self.backend))

    @rule(prompt=PROMPTS, stored=st.booleans())
    def forget_and_serve(self, prompt, stored) -> None:
        """What a busy server does to a prompt that comes again later."""
        for tier in (Tier.DEVICE, Tier.HOST) if stored else (Tier.DEVICE,):
            self.cache.evict(tier)
            for _ in range(5):
                self.cache.poll()
        ticket = self.cache.prefetch(prompt, self.world.namespace)
        for _ in range(20):
            self.cache.poll()
        self.world.serve(prompt, ticket)

    @invariant()
    def sums_match(self) -> None:
        if self.world is not None:
            self.cache.audit()
            stats = self.cache.stats()
            assert sum(stats.hit_tokens.values()) <= stats.lookup_tokens
            for request in self.requests:
                assert sum(request.match.cached_tokens.values()) <= max(0, len(request.prompt) // 4 - 1)

    @invariant()
    def running_requests_keep_their_bytes(self) -> None:
        for request in self.requests:
            if request.computed and not request.match.loading:
                self.world.check(request.match)

    def teardown(self) -> None:
        if self.world is None:
            return
        for request in self.requests:
            self.cache.release(request.match)
        self.world.clock.now_s += 1000.0
        self.world.settle()
        self.cache.audit()
        executor = self.world.executor
        if not executor.lost:
            self.world.idle()
            free = self.world.free_and_evictable(Tier.DEVICE)
            assert free == self.world.device_pages, free
            assert self.world.free_and_evictable(Tier.HOST) == self.world.host_pages
        self.cache.close()
        assert np.all([ticket.done for _, ticket in self.tickets])


TestControllerMachine = ControllerMachine.TestCase
