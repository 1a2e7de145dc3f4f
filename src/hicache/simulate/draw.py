"""A seed decides everything: the model, the machine, the settings, the requests and what goes wrong."""

import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hicache.builder import ModelDescription, split_sizes
from hicache.cache.room import most_chunk
from hicache.config import CacheConfig
from hicache.coverage import Full
from hicache.engine.work import CoreOptions
from hicache.errors import ConfigError
from hicache.simulate.scenario import Drafting, Faults, Hardware, Scenario, Storage, Workload
from hicache.simulate.shapes import DRAFTS, SHAPES, Shape
from hicache.tree import POLICIES
from hicache.units import PoolName, Tier

MOST_PROMPT = 70
MOST_ANSWER = 14
_BOUNDLESS = 1 << 40
_STALL_STEPS = 20_000
"""Where completions are lost, requests may have to be given up for the memory that these hold."""
_NEVER_STEPS = 1 << 40


def draw(seed: int, steps: int) -> Scenario:
    """The scenario of a seed: tight memory, any shape, any policy, and in most of them something that fails."""
    source = random.Random(f"hicache simulate {seed}")
    page = source.choice([1, 3, 4, 8, 16, 24])
    shape = _shape(source, page)
    running = source.randint(1, 6)
    model = shape.describe(page)
    reserved = source.choice([0, 0, 2])
    settings = _settings(source, model, page, running, reserved)
    hardware = _hardware(source, model.slot_bytes)
    faults = _faults(source)
    priorities = random.Random(f"hicache priorities {seed}")
    options = CoreOptions(
        max_running=running,
        chunk_tokens=_chunk(source, model, settings, page, running, reserved),
        snapshot_interval=source.choice([0, 1, 5, 16, 40]),
        retract=source.random() < 0.7,
        priority_ageing_s=priorities.choice([0, 20, 200, 5_000]) * hardware.step_s,
        stall_timeout_s=(_STALL_STEPS if faults.lose else _NEVER_STEPS) * hardware.step_s,
    )
    return Scenario(
        seed=seed,
        steps=steps,
        shape=shape,
        options=options,
        settings=MappingProxyType(settings),
        hardware=hardware,
        faults=faults,
        workload=replace(_workload(source, hardware), urgent=priorities.choice([0.0, 0.2, 0.5])),
        storage=_storage(source, steps, model.slot_bytes),
        drafting=Drafting(source.randint(1, 5), source.choice([0.0, 0.5, 0.9, 1.0])),
        reserved_slots=reserved,
        shutdown=source.random() < 0.25,
    )


def _shape(source: random.Random, page: int) -> Shape:
    kind = source.choice(SHAPES)
    whole = kind not in ("window", "state")
    draft = source.choice(DRAFTS) if whole and source.random() < 0.6 else "none"
    lookahead = 0 if draft == "none" else min(page, source.choice([0, 0, 1, 2]))
    return Shape(kind, source.choice([2, 5, 8, 10, 17]), draft, lookahead)


def _settings(source: random.Random, model: ModelDescription, page: int, running: int, reserved: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "page_size": page,
        "window_ratio": source.choice([0.05, 0.3, 1.0]),
        "checkpoint_share": source.choice([0.02, 0.2, 0.6]),
        "write_policy": source.choice(["write_through", "write_through_selective", "write_back"]),
        "write_through_hits": source.choice([1, 2, 3]),
        "write_back_watermark": source.choice([0.0, 0.5, 1.0]),
        "eviction_policy": source.choice(sorted(POLICIES)),
        "prefetch_batch_pages": source.randint(1, 6),
        "prefetch_timeout_s": source.choice([0.02, 1.0, 60.0]),
        "transfer_timeout_s": 1e-6,
    }
    need = -(-(MOST_PROMPT + MOST_ANSWER) // page)
    wanted = need + source.randint(0, need * source.choice([1, 1, 4]))
    settings["device_size"] = least_size(model, settings, Tier.DEVICE, running, reserved, wanted)
    host = least_size(model, settings, Tier.HOST, running, 0, source.choice([1, 1, need]))
    settings["host_size"] = host + source.choice([0, 1, 1]) * source.randint(0, 2 * settings["device_size"])
    return settings


def least_size(
    model: ModelDescription, settings: Mapping[str, Any], tier: Tier, running: int, reserved: int, pages: int
) -> int:
    """The least bytes of a tier, about, whose pools of whole prefixes hold `pages` pages."""
    low, high = 0, model.slot_bytes
    while not _holds(model, settings, tier, running, reserved, pages, high):
        low, high = high, high * 2
    while high - low > max(model.slot_bytes // 2, high // 50):
        middle = (low + high) // 2
        if _holds(model, settings, tier, running, reserved, pages, middle):
            high = middle
        else:
            low = middle
    return high


def _holds(
    model: ModelDescription,
    settings: Mapping[str, Any],
    tier: Tier,
    running: int,
    reserved: int,
    pages: int,
    size: int,
) -> bool:
    sizes = {"device_size": _BOUNDLESS, "host_size": _BOUNDLESS, f"{tier.value}_size": size}
    try:
        found = split_sizes(model, CacheConfig(**{**settings, **sizes}), reserved_slots=reserved, live_slots=running)
    except ConfigError:
        return False
    slots = found.device if tier is Tier.DEVICE else found.host
    return all(slots[pool.name] >= pages for pool in model.pools if isinstance(pool.coverage, Full))


def _chunk(
    source: random.Random, model: ModelDescription, settings: Mapping[str, Any], page: int, running: int, reserved: int
) -> int:
    chunk = source.choice([1, 2, page, page + 1, 16, 33, 64])
    config = CacheConfig(**settings)
    slots = split_sizes(model, config, reserved_slots=reserved, live_slots=running).device
    return min(chunk, chunk_limit(model, slots, page))


def chunk_limit(model: ModelDescription, slots: Mapping[PoolName, int], page: int) -> int:
    """No more prompt tokens per step than a windowed pool has room for beside the window."""
    most = most_chunk({pool.name: pool.coverage for pool in model.pools}, slots, page, model.draft_lookahead)
    return _BOUNDLESS if most is None else max(1, most)


def _hardware(source: random.Random, page_bytes: int) -> Hardware:
    """Links on which a page takes from a thousandth of a step to several steps."""
    step_s = source.choice([0.001, 0.01])
    host_page_s = step_s * 10 ** source.uniform(-3, 0.5)
    storage_page_s = step_s * 10 ** source.uniform(-2, 1)
    return Hardware(
        step_s=step_s,
        prefill_tokens_per_s=source.choice([1_000.0, 20_000.0]),
        host_bytes_per_s=page_bytes / host_page_s,
        host_latency_s=host_page_s * source.choice([0.0, 1.0]),
        storage_bytes_per_s=page_bytes / storage_page_s,
        storage_latency_s=storage_page_s * source.choice([0.0, 3.0]),
        fetch_workers=source.choice([1, 2, 4]),
    )


def _faults(source: random.Random) -> Faults:
    bad = source.choice([0.0, 0.02, 0.1, 0.3])
    return Faults(
        fail=bad * source.choice([0.0, 1.0]),
        partial=bad * source.choice([0.0, 1.0]),
        late=source.choice([0.0, 0.1, 0.5]),
        lose=0.01 if source.random() < 0.1 else 0.0,
        storage=source.choice([0.0, 0.0, 0.02, 0.1]),
    )


def _workload(source: random.Random, hardware: Hardware) -> Workload:
    return Workload(
        gap_s=hardware.step_s * source.choice([2, 6, 15, 40]),
        burst=source.choice([1, 3, 8]),
        prompt_tokens=MOST_PROMPT,
        answer_tokens=MOST_ANSWER,
        documents=source.choice([1, 3, 6]),
        turns=source.choice([0.0, 0.4, 0.8]),
        salts=source.choice([0, 1, 1, 2]),
        aborts=source.choice([0.0, 0.1, 0.4]),
        evictions=source.choice([0.0, 0.02, 0.1]),
        flushes=source.choice([0.0, 0.0, 0.01]),
    )


def _storage(source: random.Random, steps: int, page_bytes: int) -> Storage:
    chance = source.random()
    if chance < 0.4:
        return Storage()
    attach = 0 if chance < 0.8 else source.randrange(max(1, steps))
    detach = source.randrange(attach, max(attach + 1, steps)) if source.random() < 0.25 else None
    return Storage(attach, detach, source.choice([None, None, 40 * (page_bytes + 200)]))
