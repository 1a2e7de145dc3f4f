"""All that a run depends on, as one frozen value: a seed draws it, or a user states it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hicache.engine.work import CoreOptions
from hicache.simulate.shapes import Shape


@dataclass(frozen=True, slots=True)
class Hardware:
    """How long things take. Links carry so many bytes per second, one transfer after the other, each after a latency.

    A page in memory here is smaller than on the machine that is simulated, by the factor `byte_scale`.
    """

    step_s: float = 0.01
    prefill_tokens_per_s: float = 10_000.0
    host_bytes_per_s: float = 20e9
    host_latency_s: float = 20e-6
    storage_bytes_per_s: float = 2e9
    storage_latency_s: float = 1e-3
    fetch_workers: int = 2
    transfer_timeout_s: float = 30.0
    byte_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Faults:
    """How often things go wrong, as probabilities: per transfer, and `storage` per page, kind of fault and call."""

    fail: float = 0.0
    partial: float = 0.0
    late: float = 0.0
    lose: float = 0.0
    storage: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Who asks for what. Times in virtual seconds.

    `gap_s`: between bursts, on average; a burst has up to `burst` requests. `turns`: how often a request goes on from
    an answer. `documents` are what prompts begin with; none longer than `prompt_tokens`. `salts`: how many tenants;
    with 0 every request is a tenant of its own, and nothing is shared. Nobody asks while `most_open` requests have not
    ended. `stop` requests in all, if not None. `urgent`: how often a burst has another priority than 0, mostly a higher
    one. `aborts` per request; `evictions` and `flushes` per step.
    """

    gap_s: float = 0.05
    burst: int = 3
    prompt_tokens: int = 70
    answer_tokens: int = 14
    documents: int = 3
    turns: float = 0.4
    salts: int = 1
    aborts: float = 0.1
    evictions: float = 0.02
    flushes: float = 0.0
    most_open: int = 12
    stop: int | None = None
    urgent: float = 0.0


@dataclass(frozen=True, slots=True)
class Storage:
    """`attach` and `detach`: at which steps, if at all; a store that is attached again is a new one."""

    attach: int | None = None
    detach: int | None = None
    cap_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Drafting:
    """The drafter's guesses: up to `most` at a time, each right with probability `right`."""

    most: int = 3
    right: float = 0.7


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run of `steps` steps of the scheduler. `settings` are those of `CacheConfig`, without any that name a store.

    `shutdown`: the engine is closed in the middle of its work instead of ending it.
    """

    seed: int
    steps: int
    shape: Shape
    options: CoreOptions
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    hardware: Hardware = Hardware()
    faults: Faults = Faults()
    workload: Workload = Workload()
    storage: Storage = Storage()
    drafting: Drafting = Drafting()
    reserved_slots: int = 0
    shutdown: bool = False
    audit_every: int = 50
    checked: bool = True
    """Whether free memory is poisoned and sums are audited on the way; it costs time, and changes no result."""
