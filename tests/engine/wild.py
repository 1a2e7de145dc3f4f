"""Random requests over a random cache that is far too small: every answer is still that of the model alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hicache.builder import ModelDescription, split_sizes
from hicache.config import CacheConfig
from hicache.coverage import Full, Window
from hicache.device.torch import RESERVED_SLOTS, TorchDevicePool
from hicache.engine.drafts import DraftPlan
from hicache.engine.work import CoreOptions
from hicache.errors import ConfigError
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import Fault, FaultyBackend, seeded_faults
from hicache.testing.simulator import FaultRates, SimulatedExecutor
from hicache.transfer import Completion, Load, Message
from hicache.tree import POLICIES
from hicache.units import BoolArray, Tier
from tests.engine.bench import Answer, Bench
from tests.engine.drafters import source
from tests.engine.wild_subject import TOKENS, Seer, Subject

MOST_PROMPT = 70
MOST_ANSWER = 14
PATIENCE = 400
"""Steps without progress after which a request ends with an error: no run may come to that."""


class Hasty(SimulatedExecutor):
    """Some loads run as soon as they are asked for, as workers do that are quick."""

    def __init__(self, seed: int, rates: FaultRates, haste: float) -> None:
        super().__init__(seed, rates)
        self._haste = haste
        self._done: list[Completion] = []

    def submit(self, message: Message) -> None:
        alone = not any(isinstance(other, Load) for other in self.waiting)
        super().submit(message)
        if isinstance(message, Load) and alone and self._random.random() < self._haste:
            self._done += self._end([message])

    def poll(self) -> Sequence[Completion]:
        done, self._done = self._done, []
        return [*done, *super().poll()]

    def close(self) -> Sequence[Completion]:
        return [*self._done, *super().close()]


@dataclass
class Asked:
    prompt: list[int]
    most: int
    stop: str
    answer: Answer


@dataclass
class Setup:
    """What a seed decides before the first request."""

    page: int
    need: int
    options: CoreOptions
    settings: Mapping[str, Any]
    plan: DraftPlan | None
    drafter: Seer | None
    rates: FaultRates
    haste: float
    storage: FaultyBackend | None
    salts: Sequence[str]


def setup(subject: Subject, random: np.random.Generator, *, drafts: bool, lossy: bool) -> Setup:
    page = int(random.choice([1, 3, 4, 8, 16, 24]))
    description = subject.description(page)
    most = int(random.integers(1, 6))
    plan = drafter = None
    if drafts and random.random() < 0.5:
        plan = subject.draft(page, most, int(random.integers(1, description.layer_count + 1)))
    if drafts and plan is None:
        drafter = Seer(subject, source(description), most, int(random.choice([0, 1, 2, 5])))
    whole = description if plan is None else plan.description
    running = int(random.integers(1, 5))
    settings = _sizes(whole, page, running, random)
    room = _room(whole, CacheConfig(**settings), page, running)
    chunk = int(random.choice([1, 2, page, page + 1, 16, 33, 64]))
    interval = int(random.choice([0, 1, 5, 16, 40]))
    rates = _rates(random, lossy)
    options = CoreOptions(
        running,
        max(1, min(chunk, room)),
        interval,
        stall_timeout_s=PATIENCE,
        retract=bool(random.random() < 0.7),
        priority_ageing_s=20.0,
    )
    settings["write_policy"] = str(random.choice(["write_through", "write_through_selective", "write_back"]))
    settings["eviction_policy"] = str(random.choice(list(POLICIES)))
    settings["write_back_watermark"] = float(random.choice([0.0, 0.5, 1.0]))
    settings["prefetch_batch_pages"] = int(random.integers(1, 6))
    storage = None
    if random.random() < 0.5:
        seed, worst = int(random.integers(1 << 30)), float(random.choice([0.0, 0.03, 0.1]))
        storage = FaultyBackend(MemoryBackend(), seeded_faults(seed, dict.fromkeys(Fault, worst)))
    return Setup(
        page,
        MOST_PROMPT + MOST_ANSWER,
        options,
        settings,
        plan,
        drafter,
        rates,
        float(random.choice([0.0, 0.9])),
        storage,
        ["", "other"][: random.integers(1, 3)],
    )


def _rates(random: np.random.Generator, lossy: bool) -> FaultRates:
    bad = float(random.choice([0.0, 0.05, 0.2]))
    return FaultRates(float(random.choice([0.1, 0.4, 1.0])), bad, bad, 0.02 if lossy else 0.0)


def _sizes(whole: ModelDescription, page: int, running: int, random: np.random.Generator) -> dict[str, Any]:
    """Sizes at which the longest request fits, and little more."""
    pages = -(-(MOST_PROMPT + MOST_ANSWER) // page)
    wanted = pages + int(random.integers(0, pages + 1))
    shares = {
        "page_size": page,
        "window_ratio": float(random.choice([0.05, 0.3, 1.0])),
        "checkpoint_share": float(random.choice([0.02, 0.2, 0.6])),
    }
    device = _grow(whole, {**shares, "host_size": 1 << 40}, "device_size", running, wanted)
    host = _grow(whole, {**shares, "device_size": device}, "host_size", running, 1)
    return {**shares, "device_size": device, "host_size": host + int(random.integers(0, device + 1))}


def _grow(whole: ModelDescription, settings: Mapping[str, Any], which: str, running: int, pages: int) -> int:
    size = whole.slot_bytes
    while True:
        try:
            config = CacheConfig(**{**settings, which: size})
            slots = split_sizes(whole, config, reserved_slots=RESERVED_SLOTS, live_slots=running)
            found = slots.device if which == "device_size" else slots.host
            if min([pages, *(found[p.name] for p in whole.pools if isinstance(p.coverage, Full))]) >= pages:
                return size
        except ConfigError:
            pass
        size += max(whole.slot_bytes // 3, size // 20)


def _room(whole: ModelDescription, config: CacheConfig, page: int, running: int) -> int:
    slots = split_sizes(whole, config, reserved_slots=RESERVED_SLOTS, live_slots=running).device
    windows = [(pool.name, pool.coverage) for pool in whole.pools if isinstance(pool.coverage, Window)]
    return max(page, min([1 << 20, *((slots[name] - cover.pages(page) - 1) * page for name, cover in windows)]))


class Wild:
    """One run. Whatever happens follows from the seed."""

    def __init__(self, subject: Subject, seed: int, *, drafts: bool, lossy: bool = False) -> None:
        self.subject = subject
        self.random = np.random.default_rng(seed)
        self.setup = setup(subject, self.random, drafts=drafts, lossy=lossy)
        self.steps = 0
        self.asked: list[Asked] = []
        whole = self.subject.description(self.setup.page) if self.setup.plan is None else self.setup.plan.description
        self._sources = {pool.name: pool.derived_from or pool.name for pool in whole.pools}
        self._documents = [self.random.integers(0, TOKENS, MOST_PROMPT).tolist() for _ in range(3)]
        self._poisoned: dict[TorchDevicePool, BoolArray] = {}
        self.bench = self._new_bench()

    def _new_bench(self) -> Bench:
        given = self.setup
        self.transfers = Hasty(int(self.random.integers(1 << 30)), given.rates, given.haste)
        bench = Bench(
            self.subject.model,
            self.subject.description(given.page),
            options=given.options,
            transfers=self.transfers,
            backend=given.storage,
            settings={**given.settings, "transfer_timeout_s": 1e-6, "prefetch_timeout_s": 60.0},
            draft=given.plan,
            drafter=given.drafter,
            clock=lambda: float(self.steps),
        )
        self.poison(bench)
        return bench

    def poison(self, bench: Bench) -> None:
        """Nobody may read what is free."""
        allocators = bench.cache._device_allocators
        for name, pool in bench.executor.pools.items():
            owner = self._sources.get(name) or name.split(".draft")[0]
            free = np.ones(pool.slots, np.bool_)
            free[:RESERVED_SLOTS] = False
            free[allocators[owner].taken()] = False
            known = self._poisoned.get(pool, np.zeros_like(free))
            self._poisoned[pool] = free
            slots = torch.from_numpy(np.flatnonzero(free & ~known))
            if not len(slots):
                continue
            for layer, tensors in enumerate(pool.geometry.layers):
                for part in range(len(tensors)):
                    pool.tensor(layer, part)[slots] = float("nan")

    def step(self) -> None:
        self.steps += 1
        self.bench.core.step()
        self.poison(self.bench)

    def run(self, requests: int) -> None:
        for _ in range(requests):
            self.ask(self.prompt())
            for _ in range(self.random.integers(7)):
                self.step()
            self.disturb()
        self.to_the_end()
        self.check()

    def disturb(self) -> None:
        chance = self.random.random()
        if chance < 0.15:
            self.bench.core.abort(self.asked[self.random.integers(len(self.asked))].answer.id)
        elif chance < 0.35:
            pools = [None, *self.bench.cache.controller.state.pools]
            pool = pools[self.random.integers(len(pools))]
            tier = (Tier.DEVICE, Tier.HOST)[self.random.integers(2)]
            self.bench.cache.evict(tier, int(self.random.integers(1, 10)), pool)

    def prompt(self) -> list[int]:
        """A part of a document, or an earlier talk, and something new; often as long as some pages, more or less."""
        ended = [one for one in self.asked if one.answer.reason in ("length", "stop")]
        page = self.setup.page
        if ended and self.random.random() < 0.4:
            one = ended[self.random.integers(len(ended))]
            head = one.prompt + one.answer.tokens
        else:
            head = self._documents[self.random.integers(3)][: self.random.integers(0, MOST_PROMPT)]
        whole: list[int] = head + self.random.integers(0, TOKENS, self.random.integers(1, 12)).tolist()
        length = len(whole)
        if self.random.random() < 0.4:
            length = length // page * page + int(self.random.integers(-1, 2))
        elif self.random.random() < 0.1:
            length = int(self.random.integers(1, 3))
        return whole[: min(max(1, length), MOST_PROMPT)]

    def ask(self, prompt: list[int]) -> Asked:
        most, stop = int(self.random.choice([1, 2, 7, MOST_ANSWER])), ""
        if self.random.random() < 0.15:
            expected = self.subject.generate(prompt, most)
            stop = chr(0x4E00 + expected[self.random.integers(len(expected))])
        salt = self.setup.salts[int(self.random.integers(len(self.setup.salts)))]
        stops = (stop,) if stop else ()
        priority = int(self.random.choice([0, 0, 0, -3, 1, 40]))
        answer = self.bench.add(prompt, most, ignore_eos=True, salt=salt, stop=stops, priority=priority)
        self.asked.append(Asked(prompt, most, stop, answer))
        return self.asked[-1]

    def to_the_end(self) -> None:
        for _ in range(6000):
            if not self.bench.core.has_work:
                break
            self.step()
        assert not self.bench.core.has_work, self.bench.core.stats()
        self.settle()
        assert self.transfers.lost or not self.bench.core.transfers_in_flight

    def settle(self) -> None:
        for _ in range(300):
            if len(self.transfers.waiting) == 0 and self.bench.core.transfers_in_flight == self.transfers.lost:
                return
            self.step()

    def check(self) -> None:
        self.bench.cache.audit()
        if not self.transfers.lost:
            self.bench.idle()
        assert self.bench.cache.stats().open_matches == 0
        for one in self.asked:
            self.check_answer(one)
        self.asked = [one for one in self.asked if one.answer.reason in ("length", "stop")]

    def check_answer(self, one: Asked) -> None:
        tokens, reason = one.answer.tokens, one.answer.reason
        if reason == "error" and self.transfers.lost:  # what a lost transfer holds never comes back
            assert "no device memory came free" in str(one.answer.chunks[-1].error)
            return
        assert reason in ("length", "stop", "abort"), one.answer.chunks[-1].error
        self.subject.check(one.prompt, tokens)
        if reason == "length":
            assert len(tokens) == one.most
        if reason == "stop":
            assert chr(0x4E00 + tokens[-1]) == one.stop
        assert not one.stop or one.stop not in [chr(0x4E00 + token) for token in tokens[:-1]]
        cached = sum(one.answer.cached.values())
        assert cached % self.setup.page == 0 and 0 <= cached < len(one.prompt)

    def again(self) -> None:
        """What is left on the host, and in the store, is as good as what was computed."""
        before, self.asked = self.asked, []
        for _ in range(12):
            self.bench.cache.evict(Tier.DEVICE)
            self.settle()
        for one in before[-3:]:
            self.ask(one.prompt)
            self.to_the_end()
        self.check()

    def restart(self) -> None:
        """Another cache over the same store."""
        before = self.asked
        self.bench.core.close()
        self.bench, self.asked = self._new_bench(), []
        for one in before[-3:]:
            self.ask(one.prompt)
            self.to_the_end()
        self.check()
