"""What the server counts itself, in a registry of its own, beside what the engine knows."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from hicache.engine.types import Usage
from hicache.server.wire import TIERS

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)


class ServerMetrics:
    """Counters of one server. `cached_prompt_tokens` by tier over `prompt_tokens` is the hit rate."""

    def __init__(self, engine: Collector) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "hicache_requests",
            "HTTP requests that ended, by endpoint and status; 499: the client hung up",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self._running = Gauge("hicache_requests_running", "Requests being answered now", registry=self.registry)
        self._prompt = Counter("hicache_prompt_tokens", "Prompt tokens of finished answers", registry=self.registry)
        self._cached = Counter(
            "hicache_cached_prompt_tokens",
            "Prompt tokens that were not computed again, by the tier they came from; out of hicache_prompt_tokens",
            ("tier",),
            registry=self.registry,
        )
        self._tenant_prompt = Counter(
            "hicache_tenant_prompt_tokens", "Prompt tokens of finished answers", ("tenant",), registry=self.registry
        )
        self._tenant_cached = Counter(
            "hicache_tenant_cached_prompt_tokens",
            "Prompt tokens that were not computed again, out of hicache_tenant_prompt_tokens",
            ("tenant", "tier"),
            registry=self.registry,
        )
        self._completion = Counter(
            "hicache_completion_tokens", "Tokens made for finished answers", registry=self.registry
        )
        self._ttft = Histogram(
            "hicache_time_to_first_token_seconds",
            "From submission to the first token",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        for tier in TIERS:
            self._cached.labels(tier)
        self.registry.register(engine)

    def request_started(self) -> None:
        self._running.inc()

    def request_ended(self, endpoint: str, status: int) -> None:
        """`status` is the HTTP status, 499 for a client that hung up."""
        self._running.dec()
        self._requests.labels(endpoint, str(status)).inc()

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def finished(self, usage: Usage, tenant: str) -> None:
        """`tenant` is a label of the server's keys: there are as many as its settings name."""
        self._prompt.inc(usage.prompt_tokens)
        self._completion.inc(usage.completion_tokens)
        for tier in TIERS:
            self._cached.labels(tier).inc(usage.cached_tokens.get(tier, 0))
            self._tenant_cached.labels(tenant, tier).inc(usage.cached_tokens.get(tier, 0))
        self._tenant_prompt.labels(tenant).inc(usage.prompt_tokens)

    def render(self) -> bytes:
        """The text form that Prometheus scrapes."""
        return generate_latest(self.registry)
