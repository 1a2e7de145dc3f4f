"""Loads run beside the computing of others: they hold nobody up, begin before their turn, and are shared."""

from collections.abc import Mapping
from typing import Any

import pytest

from hicache.builder import describe_model
from hicache.engine.executor import Executor
from hicache.engine.model import CausalModel
from hicache.engine.work import CoreOptions
from hicache.storage.memory import MemoryBackend
from hicache.testing.families import build_tiny
from hicache.transfer import Backup, Fetch, Load, Message, Query, Store
from hicache.units import Tier
from tests.engine.bench import MODEL, Answer, Bench
from tests.engine.tiny import PAGE, prompt
from tests.hand import HandExecutor

OTHERS = (Backup, Fetch, Query, Store)
"""All transfers but loads."""
DOCUMENT = prompt(12 * PAGE + 1)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Transfers(HandExecutor):
    """By hand, until loads come `at_once`: who waits for a layer then has it."""

    at_once = False

    def submit(self, message: Message) -> None:
        super().submit(message)
        if self.at_once:
            self.run(Load)


class Hand:
    """A bench whose loads run when the test says so; everything else at once."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.transfers, self.clock = Transfers(), Clock()
        pages = options.pop("device_pages", 200)
        description = options.pop("description", MODEL)
        limits = CoreOptions(**{"max_running": 3, "chunk_tokens": 256, **options})
        self.bench = Bench(
            model,
            description,
            device_pages=pages,
            transfers=self.transfers,
            options=limits,
            clock=self.clock,
            timeout_s=10.0,
        )

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.transfers.run(*OTHERS)
            self.bench.core.step()

    def on_host(self, ids: list[int]) -> list[int]:
        """Have a prompt's pages on the host alone. Its answer."""
        answer = self.bench.ask(ids, 5, ignore_eos=True).tokens
        while self.transfers.of(*OTHERS) or self.bench.core.transfers_in_flight:
            self.step()
        self.bench.cache.evict(Tier.DEVICE)
        return answer

    def ids(self) -> list[int]:
        return [one.request.id for one in self.bench.core.lineup.running]

    def finish(self) -> Mapping[str, int]:
        """To the end. What the cache has counted."""
        self.transfers.at_once = True
        while self.bench.core.has_work or self.bench.core.transfers_in_flight:
            self.transfers.run()
            self.bench.core.step()
        self.bench.idle()
        counters = self.bench.cache.stats().counters
        self.bench.core.close()
        return counters


@pytest.fixture
def hand(model):
    return Hand(model)


def test_a_load_holds_up_nobody_else(hand):
    expected = hand.on_host(DOCUMENT)
    other = hand.bench.add(prompt(20, 1), 40, ignore_eos=True)
    hand.step(2)
    loading = hand.bench.add(DOCUMENT, 5, ignore_eos=True)
    before = len(other.tokens)
    hand.step(6)
    assert len(hand.transfers.of(Load)) == 1
    assert len(other.tokens) == before + 6 and loading.tokens == []
    hand.transfers.run(Load)
    hand.step()
    assert len(loading.tokens) == 1
    hand.finish()
    assert loading.tokens == expected
    assert loading.cached == {"device": 0, "host": 12 * PAGE, "storage": 0}


def test_alone_it_is_computed_while_its_layers_arrive(hand, model):
    expected = hand.on_host(DOCUMENT)
    begun: list[int] = []

    class Watching(Executor):
        def run(self, segments, before_layer=lambda layer: None):
            def arrive(layer: int) -> None:
                begun.append(len(hand.transfers.of(Load)))
                hand.transfers.run(Load)
                before_layer(layer)

            return super().run(segments, arrive)

    hand.bench.core._executor = Watching(model, MODEL, hand.bench.executor.pools, 1024)
    loading = hand.bench.add(DOCUMENT, 5, ignore_eos=True)
    hand.step()
    assert begun[0] == 1, "the step began before the load had ended"
    assert len(loading.tokens) == 1
    hand.finish()
    assert loading.tokens == expected


def test_of_several_that_load_only_the_first_in_turn_is_computed_before_its_load_has_ended(hand, model):
    texts = [prompt(12 * PAGE + 1, seed) for seed in (5, 6)]
    for text in texts:
        hand.on_host(text)
    widths: list[int] = []

    class Watching(Executor):
        def run(self, segments, before_layer=lambda layer: None):
            widths.append(len(segments))
            hand.transfers.run(Load, count=1)
            return super().run(segments, before_layer)

    hand.bench.core._executor = Watching(model, MODEL, hand.bench.executor.pools, 1024)
    answers = [hand.bench.add(text, 5, ignore_eos=True) for text in texts]
    hand.step()
    assert (widths, [len(answer.tokens) for answer in answers]) == ([1], [1, 0])
    hand.finish()


def test_an_overdue_load_is_given_up_without_waiting_for_it(hand):
    expected = hand.on_host(DOCUMENT)
    other = hand.bench.add(prompt(20, 1), 60, ignore_eos=True)
    hand.step()
    late = hand.bench.add(DOCUMENT, 5, ignore_eos=True)
    for _ in range(2):
        hand.step()
        assert late.tokens == []
        hand.clock.now_s += 10.1
    hand.step()
    assert len(late.tokens) == 1 and other.reason is None
    counters = hand.finish()
    assert late.tokens == expected
    assert counters["load_failed"] > 0


@pytest.fixture
def one_at_a_time(model):
    return Hand(model, max_running=1)


def waiting_behind(hand: Hand) -> tuple[list[int], Answer, Answer]:
    """A request that is computed, and one behind it whose pages are on the host."""
    expected = hand.on_host(DOCUMENT)
    first = hand.bench.add(prompt(20, 1), 10, ignore_eos=True)
    hand.step()
    second = hand.bench.add(DOCUMENT, 5, ignore_eos=True)
    hand.step(2)
    return expected, first, second


def test_the_next_in_the_queue_is_loaded_while_another_is_computed(one_at_a_time):
    hand = one_at_a_time
    expected, first, second = waiting_behind(hand)
    assert len(hand.transfers.of(Load)) == 1
    assert hand.ids() == [first.id]
    hand.transfers.run(Load)
    while first.reason is None:
        hand.step()
    hand.step()
    assert len(second.tokens) == 1
    counters = hand.finish()
    assert second.tokens == expected
    assert counters["load_pages"] == 12
    assert second.cached["host"] == 12 * PAGE


def test_while_nobody_can_be_let_in_a_prompt_is_looked_up_now_and_then_only(one_at_a_time, monkeypatch):
    hand = one_at_a_time
    expected = hand.bench.ask(DOCUMENT, 5, ignore_eos=True).tokens
    while hand.transfers.of(*OTHERS) or hand.bench.core.transfers_in_flight:
        hand.step()
    first = hand.bench.add(prompt(20, 1), 60, ignore_eos=True)
    hand.step()
    looked: list[int] = []
    match_prefix = hand.bench.cache.match_prefix
    monkeypatch.setattr(hand.bench.cache, "match_prefix", lambda *a, **k: looked.append(1) or match_prefix(*a, **k))
    second = hand.bench.add(DOCUMENT, 5, ignore_eos=True)
    hand.step(5)
    assert (len(looked), hand.transfers.of(Load)) == (1, []), "it is on the device, nothing is to be loaded"
    hand.bench.cache.evict(Tier.DEVICE)
    hand.clock.now_s += 0.1
    hand.step(5)
    assert (len(looked), len(hand.transfers.of(Load))) == (2, 1)
    assert first.reason is None
    hand.finish()
    assert second.tokens == expected


def test_a_request_that_is_loaded_ahead_can_be_aborted(one_at_a_time):
    hand = one_at_a_time
    _, first, second = waiting_behind(hand)
    hand.bench.core.abort(second.id)
    assert (second.reason, hand.bench.core.stats().waiting) == ("abort", 0)
    hand.finish()
    assert first.reason == "length"


def test_what_was_loaded_ahead_goes_before_anybody_gives_way(model):
    hand = Hand(model, max_running=1, device_pages=32)
    expected = hand.on_host(DOCUMENT)
    first = hand.bench.add(prompt(40, 1), 27 * PAGE, ignore_eos=True)
    hand.step()
    second = hand.bench.add(DOCUMENT, 5, ignore_eos=True)
    hand.step()
    hand.transfers.run(Load)
    while first.reason is None:
        assert hand.ids() == [first.id]
        hand.step()
    hand.finish()
    assert second.tokens == expected
    assert hand.bench.core.stats().preemptions == 0


def test_nothing_is_loaded_ahead_into_room_that_is_needed(model):
    hand = Hand(model, max_running=1, device_pages=19)
    hand.on_host(DOCUMENT)
    first = hand.bench.add(prompt(40, 1), 10, ignore_eos=True)
    hand.step()
    hand.bench.add(DOCUMENT, 5, ignore_eos=True)
    hand.step(3)
    assert hand.transfers.of(Load) == [] and first.reason is None
    hand.finish()


@pytest.mark.parametrize("max_running", [1, 6])
def test_requests_of_one_stored_prefix_fetch_and_load_every_page_once(model, max_running):
    backend = MemoryBackend()
    first = Bench(model, backend=backend)
    first.ask(DOCUMENT)
    first.settle()
    second = Bench(model, backend=backend, options=CoreOptions(max_running=max_running, chunk_tokens=256))
    tails = [prompt(PAGE + 3, 20 + n) for n in range(6)]
    answers = [second.add(DOCUMENT[:-1] + tail, 4, ignore_eos=True) for tail in tails]
    second.run()
    stats = second.cache.stats()
    assert stats.storage is not None and stats.storage.read_pages == 12
    assert stats.counters["load_pages"] == 12
    assert second.core.stats().prefill_tokens == 6 * (PAGE + 3)
    assert all(answer.reason == "length" and sum(answer.cached.values()) == 12 * PAGE for answer in answers)
    second.settle()
    second.idle()
    second.core.close()
    first.core.close()


def test_what_follows_a_shared_load_is_computed_once_too(hand):
    hand.on_host(DOCUMENT)
    more = DOCUMENT[:-1] + prompt(6 * PAGE, 9)
    answers = [hand.bench.add(more + prompt(5, 30 + n), 4, ignore_eos=True) for n in range(3)]
    before = hand.bench.core.stats().prefill_tokens
    counters = hand.finish()
    assert [answer.reason for answer in answers] == ["length"] * 3
    assert hand.bench.core.stats().prefill_tokens - before == 6 * PAGE + 3 * 5
    assert counters["load_pages"] == 12


def test_a_snapshot_is_read_where_the_load_that_came_put_it():
    module = build_tiny("mamba2")
    hand = Hand(CausalModel(module), description=describe_model(module.config, PAGE, "float32"))
    expected = hand.on_host(DOCUMENT)
    hand.bench.add(prompt(20, 1), 60, ignore_eos=True)
    hand.step()
    late = hand.bench.add(DOCUMENT, 5, ignore_eos=True)
    hand.step()
    hand.clock.now_s += 10.1
    hand.step()
    assert len(hand.transfers.of(Load)) == 2, "the first load was overdue"
    hand.transfers.run(Load, count=1)
    hand.clock.now_s += 10.1
    hand.step()
    assert len(hand.transfers.of(Load)) == 1 and late.tokens == expected[:1]
    hand.finish()
    assert late.tokens == expected
