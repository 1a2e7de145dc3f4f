"""One run: the real scheduler over the real cache, on memory, links and a clock that the scenario decides."""

import random

from hicache.builder import build_kv_cache
from hicache.cache import UnifiedRadixCache
from hicache.config import CacheConfig
from hicache.engine.core import EngineCore
from hicache.engine.request import Request
from hicache.engine.types import Chunk, SamplingParams
from hicache.errors import InvariantError
from hicache.keys import Namespace
from hicache.simulate.broken import RuleError, RunError
from hicache.simulate.clock import VirtualClock
from hicache.simulate.content import alphabet
from hicache.simulate.drafter import VirtualDrafter
from hicache.simulate.journal import Journal
from hicache.simulate.links import Links
from hicache.simulate.memory import DeviceMemory, Poison, device_arrays, host_arrays
from hicache.simulate.model import VirtualModel
from hicache.simulate.report import Report, make_report
from hicache.simulate.requests import Asked, Draft, Requests
from hicache.simulate.rules import check_all_answered, check_chunk, check_end, check_idle
from hicache.simulate.scenario import Scenario
from hicache.simulate.shapes import Routes
from hicache.simulate.tenants import Tenants
from hicache.simulate.truth import Truth
from hicache.simulate.turns import Turns
from hicache.storage import PageStore
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import Fault, FaultyBackend, seeded_faults
from hicache.units import Tier

PATIENCE_STEPS = 2_000
"""Steps in which no request gets a token or ends though there is work, and none may still wait for storage: a hang."""

END_STEPS = 40_000
"""Steps that the requests may still take when no more come: a hang, or a request that starves."""

_HURRY = 20
"""After so many steps in which nobody gets on, the clock goes faster: who waits for a timeout gets there."""


class Numbers:
    """A decoder for token ids as they are: one character each."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """One character per token."""
        return "".join(chr(0x4E00 + token) for token in token_ids)


class World:
    """Everything of one run. `keep`: the journal keeps its lines."""

    def __init__(self, scenario: Scenario, *, keep: bool = False) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        self.journal = Journal(self.clock, keep)
        self.asked: list[Asked] = []
        self._open: dict[int, Asked] = {}
        self._random = random.Random(f"hicache world {scenario.seed}")
        self._tenants = Tenants()
        self._requests = Requests(scenario.workload, scenario.seed, self._page_size)
        self._fruitless = 0
        self._patience_s = CacheConfig(**scenario.settings).prefetch_timeout_s
        self._patient_until_s = self._patience_s
        self._build()

    @property
    def _page_size(self) -> int:
        return int(self.scenario.settings["page_size"])

    def _build(self) -> None:
        given = self.scenario
        model = given.shape.describe(self._page_size)
        routes = Routes.of(model)
        positions = given.workload.prompt_tokens + given.workload.answer_tokens + 64
        letters = alphabet(positions)
        self.truth = Truth(letters, routes.sights)
        self.links = Links(self.clock, given.hardware, given.faults, given.seed, self.journal)
        self.memory = DeviceMemory()
        self.cache = self._new_cache()
        self._namespace = Namespace(
            "virtual", "0", "uint64", self._page_size, model.fingerprint, draft_lookahead=given.shape.lookahead
        )
        executor = VirtualModel(
            model.layer_count,
            routes,
            self.memory.pools,
            letters,
            self.truth,
            self.clock,
            self.links,
            given.hardware,
            self.journal,
        )
        self.core = EngineCore(self.cache, executor, given.options, self.clock, self._drafter())
        self._turns = Turns(self.core.lineup, given.options.priority_ageing_s)
        entries = self.cache.controller.mem_pool_host.entries
        self._poison = {
            Tier.DEVICE: Poison(device_arrays(entries, self.memory)),
            Tier.HOST: Poison(host_arrays(entries)),
        }

    def _new_cache(self) -> UnifiedRadixCache:
        given = self.scenario
        return build_kv_cache(
            given.shape.describe(self._page_size),
            CacheConfig(**given.settings),
            device_pool=self.memory.make,
            reserved_slots=given.reserved_slots,
            live_slots=given.options.max_running,
            executor=self.links,
            clock=self.clock,
        )

    def _drafter(self) -> VirtualDrafter | None:
        given = self.scenario
        name = given.shape.draft_memory
        if name is None:
            return None
        return VirtualDrafter(
            next(iter(Routes.of(given.shape.describe(self._page_size)).token_pools)),
            given.shape.lookahead,
            self.memory.pools[name],
            alphabet(given.workload.prompt_tokens + given.workload.answer_tokens + 64),
            self.truth,
            given.drafting,
            random.Random(f"hicache drafter {given.seed}"),
        )

    # Running

    def run(self) -> Report:
        """The whole run. Raises RuleError, or another InvariantError, at the first thing that is wrong."""
        self._poison_free()
        while not self._enough():
            self._disturb()
            self._arrive()
            self._abort_due()
            self._step()
        if not self.scenario.shutdown:
            self._finish()
        return self._end()

    def _enough(self) -> bool:
        if self._requests.ended:
            return not self.core.has_work
        return self.journal.step >= self.scenario.steps

    def _step(self) -> None:
        self.journal.step += 1
        self._fruitless += 1
        if not self.core.step():
            self._idle()
        if self._fruitless > PATIENCE_STEPS and self.clock.now_s > self._patient_until_s and self.core.has_work:
            raise RuleError("progress", f"no request got on for {PATIENCE_STEPS} steps: {self.core.stats()}")
        if self.scenario.checked:
            self._turns.check_step(self._open.values(), quiet=self.cache.in_flight == 0)
            self._poison_free()
            if self.journal.step % self.scenario.audit_every == 0:
                self.cache.audit()

    def _idle(self) -> None:
        """Nothing could be computed: the clock goes on to what comes next."""
        now_s, tick_s = self.clock.now_s, self.scenario.hardware.step_s * (1 + self._fruitless // _HURRY) / 2
        coming = [self.links.next_s, self._requests.next_s, now_s + tick_s if self.core.has_work else None]
        later = [time_s for time_s in coming if time_s is not None and time_s > now_s]
        self.clock.pass_to(min(later, default=now_s + tick_s))

    def _finish(self) -> None:
        """No more requests come: all that are there get their answers, and all is at rest."""
        for _ in range(END_STEPS):
            if not self.core.has_work:
                break
            self._abort_due()
            self._step()
        else:
            raise RuleError("progress", f"{END_STEPS} steps after the last request: {self.core.stats()}")
        for _ in range(END_STEPS):
            if self.core.transfers_in_flight == self.links.lost:
                break
            self._step()
        self.cache.audit()
        check_idle(self.cache.stats(), self.links.lost)

    def _end(self) -> Report:
        self.cache.audit()
        core, cache = self.core.stats(), self.cache.stats()
        lost = self.links.lost
        for one in self._open.values():
            one.abort_s = self.clock.now_s
        self.core.close()
        check_all_answered(self.asked)
        self.journal.note("closed")
        return make_report(
            self.scenario.seed,
            self.journal.digest,
            self.journal.events,
            self.clock.now_s,
            self.asked,
            core,
            cache,
            self.links.carried,
            lost,
            tuple(self.journal.lines),
        )

    # What happens to it from outside

    def _arrive(self) -> None:
        most = self.scenario.workload.most_open
        while not self._requests.ended and self._requests.next_s <= self.clock.now_s and len(self._open) < most:
            for draft in self._requests.burst():
                self._ask(draft)

    def _ask(self, draft: Draft) -> None:
        known = self.truth.tell(draft.prompt, draft.answer_tokens)
        self._tenants.add(draft.salt, known)
        abort_s = None if draft.abort_after_s is None else self.clock.now_s + draft.abort_after_s
        one = Asked(len(self.asked), known, draft.salt, self.clock.now_s, abort_s, draft.priority)
        self.asked.append(one)
        self._open[one.id] = one
        self._patient_until_s = self.clock.now_s + self._patience_s
        tokens = f"{len(draft.prompt)} tokens and {draft.answer_tokens}"
        self.journal.note(f"request {one.id} of {tokens} for {draft.salt}, priority {draft.priority}")
        request = Request(
            one.id,
            draft.prompt,
            SamplingParams(max_tokens=draft.answer_tokens, ignore_eos=True, seed=0),
            self._namespace.with_salt(draft.salt),
            Numbers(),
            frozenset(),
            lambda chunk: self._emit(one, chunk),
            self.clock.now_s,
            lambda: self._turns.check_admitted(one, self._open.values()),
            draft.priority,
        )
        self.core.add(request)

    def _emit(self, one: Asked, chunk: Chunk) -> None:
        self._fruitless = 0
        self._patient_until_s = self.clock.now_s + self._patience_s
        self.journal.note(f"chunk {one.id} {chunk.token_ids} {chunk.finish_reason}")
        check_chunk(one, chunk)
        one.chunks.append(chunk)
        if chunk.finish_reason is not None:
            one.ended_s = self.clock.now_s
            del self._open[one.id]
            check_end(one, self._tenants, self._page_size, lossy=self.links.lost > 0)
            if chunk.finish_reason == "length":
                self._requests.answered(one.known.tokens)

    def _abort_due(self) -> None:
        due = [one for one in self._open.values() if one.abort_s is not None and one.abort_s <= self.clock.now_s]
        for one in due:
            self.journal.note(f"abort {one.id}")
            self.core.abort(one.id)

    def _disturb(self) -> None:
        given, step = self.scenario, self.journal.step
        if step == given.storage.attach:
            self._attach()
        if step == given.storage.detach and self.cache.controller.storage is not None:
            self.journal.note("storage is detached")
            self.cache.detach_storage_backend()
        if self._random.random() < given.workload.evictions:
            pool = self._random.choice([None, *self.cache.controller.state.pools])
            tier = self._random.choice((Tier.DEVICE, Tier.HOST))
            pages = self._random.choice((1, 3, 10, None))
            gone = self.cache.evict(tier, pages, pool)
            self.journal.note(f"evict {pages} {pool} {tier.value}: {gone}")

        if self._random.random() < given.workload.flushes:
            self.cache.flush(force=True)
            self.journal.note("flush")

    def _attach(self) -> None:
        given = self.scenario
        rate = given.faults.storage
        faults = seeded_faults(given.seed, dict.fromkeys(Fault, rate) if rate else {})
        backend = FaultyBackend(MemoryBackend(given.storage.cap_bytes), faults)
        self.journal.note("storage is attached")
        self.cache.attach_storage_backend(PageStore(backend))

    def _poison_free(self) -> None:
        for tier, poison in self._poison.items():
            for pool in self.cache.controller.state.pools:
                poison.spread(pool, self.cache.taken_slots(pool, tier))


def run_scenario(scenario: Scenario, *, keep: bool = False) -> Report:
    """One run; with `keep` its events are in the report. Raises RunError when a rule is broken."""
    world = World(scenario, keep=keep)
    try:
        return world.run()
    except InvariantError as error:
        journal = world.journal
        raise RunError(scenario.seed, journal.step, journal.digest, error, tuple(journal.lines)) from error
