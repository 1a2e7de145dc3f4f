"""Fetches run in the background, once per page; a deadline, a failure or a cancel shrinks the hit, never more."""

import pytest

from hicache.builder import ModelDescription, PoolDescription
from hicache.controller import Prefetch
from hicache.coverage import Checkpoint, Window
from hicache.keys import page_keys
from hicache.storage import PageStore, StorageKey
from hicache.storage.memory import MemoryBackend
from hicache.testing.faults import Fault, FaultyBackend, Operation
from hicache.transfer import Backup, Fetch, Query, Store
from hicache.units import Tier
from tests.hand import HandExecutor
from tests.world import MODELS, PAGE, World, geometry, tokens

PROMPT = tokens(*range(6 * PAGE + 1))
FORK = PROMPT[: 3 * PAGE * 4] + tokens(*range(500, 500 + 3 * PAGE + 1))

WINDOW_ONLY = ModelDescription(1, (PoolDescription("swa", geometry(1, 3), (0,), coverage=Window(2 * PAGE + 1)),))
STATE_ONLY = ModelDescription(1, (PoolDescription("state", geometry(1, 9, tokens=1), (0,), coverage=Checkpoint()),))
ALL = MODELS | {"window": WINDOW_ONLY, "state": STATE_ONLY}


class Shelf(MemoryBackend):
    """Outlives the caches that use it."""

    def close(self) -> None:
        """Keeps everything."""


def stored(model: str = "one", *prompts: bytes, **settings) -> tuple[World, HandExecutor, FaultyBackend]:
    """A world whose storage, and nothing else, has the prompts."""
    backend = FaultyBackend(Shelf(), lambda operation, key: None)
    hand = HandExecutor()
    first = World(ALL[model], executor=hand, backend=backend, device_pages=32)
    for prompt in prompts or (PROMPT,):
        first.serve(prompt)
        hand.settle(first.cache.poll)
    first.cache.close()
    hand = HandExecutor()
    return World(ALL[model], executor=hand, backend=backend, **settings), hand, backend


def begins(world: World, hand: HandExecutor, prompt: bytes = PROMPT, timeout_s: float = 10.0) -> Prefetch:
    """A ticket whose query has been answered."""
    ticket = world.cache.prefetch(prompt, world.namespace, timeout_s)
    hand.run(Query)
    world.cache.poll()
    return ticket


def finishes(world: World, hand: HandExecutor, ticket: Prefetch, prompt: bytes = PROMPT):
    """The prompt is served; returns its cached tokens by tier."""
    match = world.cache.match_prefix(prompt, world.namespace, ticket)
    load = world.cache.load_back(match)
    hand.settle(world.cache.poll)
    load.result()
    world.check(match)
    cached = dict(match.cached_tokens)
    missing = len(prompt) // 4 - match.length_tokens
    assert world.allocate(match, missing)
    world.compute(match, prompt)
    world.cache.insert(match, prompt)
    world.cache.release(match)
    hand.settle(world.cache.poll)
    world.idle()
    return cached


@pytest.mark.parametrize("model", sorted(ALL))
def test_every_full_page_comes_from_storage_and_is_said_to(model):
    world, hand, _ = stored(model)
    ticket = begins(world, hand)
    assert not ticket.done
    world.cache.audit()
    hand.settle(world.cache.poll)
    assert ticket.done
    cached = finishes(world, hand, ticket)
    assert sum(cached.values()) == 6 * PAGE
    stats = world.cache.stats()
    assert stats.counters["store_pages"] == 0, "what came from storage is there already"
    if model in MODELS:
        assert cached == {"device": 0, "host": 0, "storage": 6 * PAGE}
        assert stats.hit_tokens[Tier.STORAGE] == 6 * PAGE


@pytest.mark.parametrize("model", sorted(ALL))
@pytest.mark.parametrize("bad", range(6))
@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.FLIP])
def test_a_page_that_cannot_be_read_cuts_the_hit(model, bad, fault):
    """In groups without a pool of full coverage too: there nothing but the last pages may be fetched."""
    world, hand, backend = stored(model)
    pool = ALL[model].pools[0].name
    keys = page_keys(world.namespace.fingerprint, PROMPT, PAGE)
    page = keys[32 * bad : 32 * (bad + 1)]

    def choose(operation: Operation, key: StorageKey) -> Fault | None:
        return fault if operation is Operation.READ and (key.pool, key.page) == (pool, page) else None

    backend.choose = choose
    ticket = begins(world, hand)
    hand.settle(world.cache.poll)
    assert ticket.done
    cached = finishes(world, hand, ticket)
    if model in MODELS:
        assert cached["storage"] <= bad * PAGE
    assert sum(cached.values()) <= 6 * PAGE
    if model in ("one", "derived"):
        assert cached == {"device": 0, "host": 0, "storage": bad * PAGE}


def test_two_tickets_for_one_prompt_fetch_it_once():
    world, hand, _ = stored()
    one, other = begins(world, hand), begins(world, hand)
    assert sum(len(part.keys) for fetch in hand.of(Fetch) for part in fetch.content) == 6
    hand.settle(world.cache.poll)
    assert one.done
    assert other.done
    assert world.cache.stats().counters["fetch_pages"] == 6
    assert finishes(world, hand, other)["storage"] == 6 * PAGE


def test_a_fork_waits_for_what_it_shares_and_fetches_the_rest():
    world, hand, _ = stored("one", PROMPT, FORK)
    one = begins(world, hand, PROMPT)
    fork = begins(world, hand, FORK)
    hand.settle(world.cache.poll)
    assert one.done
    assert fork.done
    assert world.cache.stats().counters["fetch_pages"] == 9
    assert finishes(world, hand, fork, FORK)["storage"] == 6 * PAGE


def test_only_pages_of_its_own_prompt_count_as_fetched_for_a_ticket():
    """The fork's own tail is on the host; that the other prompt's tail came from storage is not its hit."""
    world, hand, _ = stored()
    one = begins(world, hand)
    fork = begins(world, hand, FORK)
    hand.run()
    world.cache.poll()
    world.serve(FORK)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    assert one.done
    assert fork.fetched(6).tolist() == [True] * 3 + [False] * 3
    assert finishes(world, hand, fork, FORK) == {"device": 0, "host": 3 * PAGE, "storage": 3 * PAGE}


def test_a_deadline_ends_the_ticket_and_what_comes_later_still_lands():
    world, hand, _ = stored(timeout_s=1e-9)
    ticket = begins(world, hand, timeout_s=5.0)
    world.clock.now_s = 4.9
    world.cache.poll()
    assert not ticket.done
    world.clock.now_s = 5.0
    world.cache.poll()
    assert ticket.done
    assert world.cache.stats().counters["prefetch_deadlines"] == 1
    assert world.cached(PROMPT) == (0, 0)
    hand.settle(world.cache.poll)
    assert world.cached(PROMPT) == (0, 6 * PAGE)
    world.idle()


@pytest.mark.parametrize("before", ["query", "fetch"])
def test_a_cancelled_ticket_is_done_and_leaks_nothing(before):
    world, hand, _ = stored()
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    if before == "fetch":
        hand.run(Query)
        world.cache.poll()
    world.cache.cancel_prefetch(ticket)
    world.cache.cancel_prefetch(ticket)
    assert ticket.done
    hand.settle(world.cache.poll)
    world.idle()
    assert world.cached(PROMPT)[1] == (6 * PAGE if before == "fetch" else 0)
    assert world.cache.stats().counters["prefetch_deadlines"] == 0


def test_no_storage_and_nothing_to_fetch_are_done_at_once():
    world = World()
    assert world.cache.prefetch(PROMPT, world.namespace).done
    world, _, _ = stored()
    assert world.cache.prefetch(tokens(1), world.namespace).done
    world.serve(PROMPT)
    assert world.cache.prefetch(PROMPT, world.namespace).done


def test_a_host_and_a_device_that_are_full_fetch_as_much_as_the_host_can_take():
    world, hand, _ = stored(host_pages=4, device_pages=2)
    ticket = begins(world, hand)
    hand.settle(world.cache.poll)
    assert ticket.done
    assert world.cached(PROMPT) == (0, 4 * PAGE)
    assert world.cache.stats().counters["fetch_refused_pages"] == 2


def test_a_ticket_that_comes_short_is_planned_once_more():
    world, hand, _ = stored()
    ticket = begins(world, hand)
    hand.run(Fetch, bad={"kv": [1]}, count=1)
    hand.run(Fetch)
    world.cache.poll()
    assert not ticket.done, "the query is asked again"
    assert world.cached(PROMPT) == (0, PAGE)
    hand.run(Query)
    world.cache.poll()
    hand.run(Fetch)
    world.cache.poll()
    assert ticket.done
    assert world.cached(PROMPT) == (0, 6 * PAGE)
    assert finishes(world, hand, ticket)["storage"] == 6 * PAGE


def test_batches_that_arrive_out_of_order_wait_for_the_first():
    world, hand, _ = stored()
    begins(world, hand)
    fetches = hand.of(Fetch)
    hand.waiting[:] = [fetches[2], fetches[0], fetches[1]]
    hand.run(count=1)
    world.cache.poll()
    assert world.cached(PROMPT) == (0, 0)
    host = next(pool for pool in world.cache.stats().pools if pool.tier is Tier.HOST)
    assert (host.cached, host.other) == (0, 6), "what lies behind a page that may not come is not published"
    world.cache.audit()
    hand.run(count=1)
    world.cache.poll()
    assert world.cached(PROMPT) == (0, 2 * PAGE)
    hand.settle(world.cache.poll)
    assert world.cached(PROMPT) == (0, 6 * PAGE)
    world.idle()


def test_pages_between_those_that_are_fetched_may_be_fetched_by_another():
    """Pages 2 and 3 are on their way, and computed meanwhile; then page 1 is lost and fetched together with page 5."""
    world, hand, _ = stored(batch_pages=8)
    begins(world, hand, PROMPT[: (5 * PAGE + 1) * 4])
    hand.settle(world.cache.poll)
    lose(world, 2, 4)
    short = begins(world, hand, PROMPT[: (4 * PAGE + 1) * 4])
    (inner,) = hand.of(Fetch)
    assert len(inner.content[0].keys) == 2
    match = world.cache.match_prefix(PROMPT[: (4 * PAGE + 1) * 4], world.namespace)
    assert world.allocate(match, 4 * PAGE + 1)
    world.compute(match, match.tokens)
    world.cache.insert(match, match.tokens)
    world.cache.release(match)
    for _ in range(3):
        hand.run(Backup, Store)
        world.cache.poll()
    world.cache.evict(Tier.DEVICE)
    lose(world, 1, 2)
    long = begins(world, hand)
    assert [len(fetch.content[0].keys) for fetch in hand.of(Fetch)] == [2, 2]
    hand.settle(world.cache.poll)
    world.cache.audit()
    assert short.done
    assert long.done
    assert world.cached(PROMPT) == (0, 6 * PAGE)
    world.idle()


def lose(world: World, start: int, stop: int) -> None:
    """Take pages from the host, as a load that can't read them does."""
    state = world.cache.controller.state
    found = state.tree.match(world.namespace.fingerprint, PROMPT)
    state.free_eviction(state.tree.detach(state.tree.span(found, start, stop), Tier.HOST, ["kv"]))


def test_a_page_found_damaged_is_written_again_even_if_it_was_known_to_be_stored():
    world, hand, backend = stored("one")
    ticket = begins(world, hand)
    hand.settle(world.cache.poll)
    assert ticket.done
    state = world.cache.controller.state
    found = state.tree.match(world.namespace.fingerprint, PROMPT)
    keys = state.tree.page_keys(state.tree.span(found, 0, 6))
    lose(world, 2, 3)
    damaged = keys[2 * 32 : 3 * 32]
    backend.choose = lambda operation, key: Fault.FLIP if operation is Operation.READ and key.page == damaged else None
    ticket = begins(world, hand)
    hand.settle(world.cache.poll)
    assert ticket.done
    backend.choose = lambda operation, key: None
    assert world.cached(PROMPT) == (0, 2 * PAGE)
    written = world.cache.stats().storage.written_pages
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert world.cache.stats().storage.written_pages == written + 1
    world.idle()


def test_a_store_that_is_gone_ends_tickets_without_a_hit():
    world, hand, backend = stored()
    backend.choose = lambda operation, key: Fault.RAISE
    ticket = world.cache.prefetch(PROMPT, world.namespace)
    hand.settle(world.cache.poll)
    assert ticket.done
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert world.cache.stats().counters["store_failed_pages"] > 0
    world.idle()


def test_detaching_ends_tickets_and_the_store_is_closed_when_its_transfers_have_settled():
    closed = []

    class Told(MemoryBackend):
        def close(self) -> None:
            closed.append(self)
            super().close()

    hand = HandExecutor()
    world = World(executor=hand, backend=Told())
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    world.cache.evict(Tier.DEVICE)
    world.cache.evict(Tier.HOST)
    ticket = begins(world, hand)
    world.cache.detach_storage_backend()
    assert ticket.done
    assert not closed, "fetches still read from it"
    world.cache.attach_storage_backend(PageStore(Shelf()))
    hand.settle(world.cache.poll)
    assert len(closed) == 1
    assert world.cached(PROMPT) == (0, 6 * PAGE)
    world.serve(PROMPT)
    hand.settle(world.cache.poll)
    assert world.cache.stats().storage.written_pages == 6, "what the old store had is new to the new one"
    world.idle()
