"""What the engine and its cache know, as Prometheus families: read when somebody scrapes, and kept nowhere."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hicache.cache import CacheStats, PoolStats
from hicache.pools import GroupCounts
from hicache.server.engine_like import CoreCounts, StatsLike
from hicache.storage import BreakerState, PageStoreStats
from hicache.units import Tier

FAILURES = frozenset(
    {
        "backup_failed_pages",
        "backup_refused_pages",
        "dropped_pages",
        "load_failed",
        "load_refused",
        "store_failed_pages",
        "fetch_failed_pages",
        "fetch_refused_pages",
        "prefetch_deadlines",
        "retraction_refused",
        "retraction_lost",
    }
)
"""Counters of the cache that each shrink a hit."""

OWN_FAMILY = frozenset({"lookup_tokens", "kv_hit_without_state"})
"""Counters of the cache that are shown on their own, with those by tier."""


class EngineCollector(Collector):
    """Reads `stats` and `health` at every scrape."""

    def __init__(self, stats: Callable[[], StatsLike], health: Callable[[], tuple[str, ...]]) -> None:
        self._stats = stats
        self._health = health

    def collect(self) -> Iterator[Metric]:
        both = self._stats()
        core, stats = both.core, both.cache
        yield _gauge("hicache_degraded", "Things that are degraded now; /health names them", len(self._health()))
        yield from _core(core)
        yield _gauge("hicache_engine_queued_requests", "Requests that wait to be admitted", both.queued)
        yield _counter("hicache_engine_refused_requests", "Requests refused because too many wait", both.refused)
        yield from _pools(stats.pools)
        yield from _reservations(stats.group)
        yield _hits(stats)
        yield _tenants(stats)
        yield _counter("hicache_cache_lookup_tokens", "Prompt tokens looked up in the cache", stats.lookup_tokens)
        yield _counter(
            "hicache_cache_kv_hit_without_state_tokens",
            "Prompt tokens behind a hit that had KV, and no snapshot of the state to resume at",
            stats.counters["kv_hit_without_state"],
        )
        yield _gauge("hicache_transfers_in_flight", "Transfers between tiers that have not settled", stats.in_flight)
        yield _gauge("hicache_open_matches", "Requests that hold pages of the cache", stats.open_matches)
        yield _gauge("hicache_retracted_requests", "Requests that are off the device for a while", stats.retracted)
        yield _gauge("hicache_pins", "Locks held on cached pages", stats.pins)
        yield from _counted(stats, core)
        yield _gauge("hicache_storage_attached", "1 while pages are stored", int(stats.storage is not None))
        if stats.storage is not None:
            yield from _storage(stats.storage)


def _gauge(name: str, text: str, value: int) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _core(core: CoreCounts) -> Iterator[Metric]:
    requests = GaugeMetricFamily("hicache_engine_requests", "Requests in the engine now, by state", labels=("state",))
    requests.add_metric(("running",), core.running)
    requests.add_metric(("waiting",), core.waiting)
    requests.add_metric(("retracted",), core.retracted)
    yield requests
    tokens = CounterMetricFamily("hicache_engine_tokens", "Tokens that were computed, by phase", labels=("phase",))
    tokens.add_metric(("prefill",), core.prefill_tokens)
    tokens.add_metric(("decode",), core.decode_tokens)
    yield tokens
    yield _counter("hicache_engine_drafted_tokens", "Tokens that were guessed ahead", core.drafted_tokens)
    yield _counter(
        "hicache_engine_accepted_tokens", "Of the tokens guessed, those that the model chose too", core.accepted_tokens
    )
    yield _counter("hicache_engine_steps", "Steps that computed something", core.steps)
    yield _counter("hicache_engine_preemptions", "Requests that gave way to an older one", core.preemptions)
    yield _counter("hicache_engine_retractions", "Of those, requests that were kept whole", core.retractions)


def _pools(pools: tuple[PoolStats, ...]) -> Iterator[Metric]:
    slots = GaugeMetricFamily(
        "hicache_pool_slots", "Slots by pool, tier and state; busy: lent or in flight", labels=("pool", "tier", "state")
    )
    sizes = GaugeMetricFamily("hicache_pool_slot_bytes", "Bytes of one slot", labels=("pool", "tier"))
    for pool in pools:
        for state, count in (("free", pool.free), ("cached", pool.cached), ("busy", pool.other)):
            slots.add_metric((pool.pool, pool.tier.value, state), count)
        sizes.add_metric((pool.pool, pool.tier.value), pool.slot_bytes)
    yield slots
    yield sizes


def _reservations(group: GroupCounts) -> Iterator[Metric]:
    met = CounterMetricFamily(
        "hicache_reservations", "Reservations of slots, in all pools at once, that were met, by tier", labels=("tier",)
    )
    met.add_metric((Tier.DEVICE.value,), group.device_reservations)
    met.add_metric((Tier.HOST.value,), group.host_reservations)
    yield met
    labels = ("pool", "tier")
    reclaims = CounterMetricFamily("hicache_pool_reclaims", "Times that a pool was told to evict", labels=labels)
    slots = CounterMetricFamily("hicache_pool_reclaimed_slots", "Slots that were free right after that", labels=labels)
    refusals = CounterMetricFamily(
        "hicache_pool_refusals", "Reservations that were refused at once, by the pool that lacked slots", labels=labels
    )
    rollbacks = CounterMetricFamily(
        "hicache_pool_rollbacks", "Reservations that were undone, by the pool that fell short", labels=labels
    )
    for counts in group.pools:
        place = (counts.pool, counts.tier.value)
        reclaims.add_metric(place, counts.reclaims)
        slots.add_metric(place, counts.reclaimed_slots)
        refusals.add_metric(place, counts.refusals)
        rollbacks.add_metric(place, counts.rollbacks)
    yield from (reclaims, slots, refusals, rollbacks)


def _hits(stats: CacheStats) -> Metric:
    hits = CounterMetricFamily(
        "hicache_cache_hit_tokens", "Of the tokens looked up, those that were there, by tier", labels=("tier",)
    )
    for tier, tokens in stats.hit_tokens.items():
        hits.add_metric((tier.value,), tokens)
    return hits


def _tenants(stats: CacheStats) -> Metric:
    held = GaugeMetricFamily(
        "hicache_tenant_cached_bytes",
        'Bytes cached in memory for each tenant with a quota, by tier; "": all others',
        labels=("tenant", "tier"),
    )
    for tenant, tiers in stats.tenant_bytes.items():
        for tier, count in tiers.items():
            held.add_metric((tenant, tier.value), count)
    return held


def _counted(stats: CacheStats, core: CoreCounts) -> Iterator[Metric]:
    failures = CounterMetricFamily("hicache_failures", "What went wrong and shrank a hit, by kind", labels=("kind",))
    work = CounterMetricFamily("hicache_cache_work", "What the cache has done, by kind", labels=("kind",))
    for kind, count in stats.counters.items():
        if kind in FAILURES:
            failures.add_metric((kind,), count)
        elif kind not in OWN_FAMILY and not kind.startswith("hit_tokens"):
            work.add_metric((kind,), count)
    failures.add_metric(("failed_requests",), core.failed_requests)
    failures.add_metric(("void_steps",), core.void_steps)
    yield failures
    yield work


def _breakers(storage: PageStoreStats) -> Iterator[Metric]:
    paused = GaugeMetricFamily("hicache_storage_paused", "1 while the store is left alone, by side", labels=("side",))
    opened = CounterMetricFamily("hicache_storage_pauses", "Times that it was begun to be", labels=("side",))
    refused = CounterMetricFamily("hicache_storage_refused_calls", "Calls answered without the store", labels=("side",))
    for side, breaker in (("read", storage.reading), ("write", storage.writing)):
        paused.add_metric((side,), int(breaker.state is not BreakerState.CLOSED))
        opened.add_metric((side,), breaker.opened)
        refused.add_metric((side,), breaker.refused_calls)
    yield from (paused, opened, refused)


def _storage(storage: PageStoreStats) -> Iterator[Metric]:
    pages = CounterMetricFamily("hicache_storage_pages", "Pages asked of the store, by outcome", labels=("outcome",))
    for outcome, count in (
        ("read", storage.read_pages),
        ("missed", storage.missed_pages),
        ("damaged", storage.damaged_pages),
        ("read_failed", storage.read_failed_pages),
        ("written", storage.written_pages),
        ("skipped", storage.skipped_pages),
        ("write_failed", storage.write_failed_pages),
    ):
        pages.add_metric((outcome,), count)
    yield pages
    yield from _breakers(storage)
    moved = CounterMetricFamily("hicache_storage_bytes", "Payload bytes of whole pages", labels=("direction",))
    moved.add_metric(("read",), storage.read_bytes)
    moved.add_metric(("written",), storage.written_bytes)
    yield moved
