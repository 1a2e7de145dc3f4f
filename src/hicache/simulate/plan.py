"""A machine and its settings as a user states them: no faults, one workload, and what came of it."""

from types import MappingProxyType

from hicache.builder import split_sizes
from hicache.config import CacheConfig
from hicache.engine.work import CoreOptions
from hicache.errors import ConfigError
from hicache.simulate.draw import chunk_limit
from hicache.simulate.scenario import Faults, Hardware, Scenario, Storage, Workload
from hicache.simulate.shapes import Shape

_NEVER_S = 1e9


def plan(
    seed: int,
    steps: int,
    shape: Shape,
    config: CacheConfig,
    hardware: Hardware,
    workload: Workload,
    *,
    token_bytes: int,
    max_running: int = 16,
    chunk_tokens: int = 512,
    retract: bool = True,
    storage: bool = False,
) -> Scenario:
    """A run of `workload` on `hardware`. Sizes of `config` and bandwidths are those of the machine that is meant.

    A token has `token_bytes` bytes of state there; in the simulator it has fewer, and sizes are cut down as much.
    `storage`: whether there is a store, of any size. Raises ConfigError for sizes that hold too little.
    """
    model = shape.describe(config.page_size)
    scale = token_bytes * config.page_size / model.slot_bytes
    device_size, host_size = round(config.device_size / scale), round(config.host_size / scale)
    settings = {
        **config.model_dump(),
        "device_size": max(1, device_size),
        "host_size": max(1, host_size),
        "storage_url": None,
        "storage_size": None,
        "transfer_timeout_s": 1e-6,
    }
    slots = split_sizes(model, CacheConfig(**settings), live_slots=max_running).device
    need = -(-(workload.prompt_tokens + workload.answer_tokens) // config.page_size)
    if min(slots.values()) < need and shape.kind in ("full", "latent"):
        raise ConfigError(
            f"device_size holds {min(slots.values())} pages, and one request of this workload needs {need};"
            " give it more, or ask for shorter prompts"
        )
    return Scenario(
        seed=seed,
        steps=steps,
        shape=shape,
        options=CoreOptions(
            max_running, min(chunk_tokens, chunk_limit(model, slots, config.page_size)), 0, retract, _NEVER_S
        ),
        settings=MappingProxyType(settings),
        hardware=Hardware(
            hardware.step_s,
            hardware.prefill_tokens_per_s,
            hardware.host_bytes_per_s,
            hardware.host_latency_s,
            hardware.storage_bytes_per_s,
            hardware.storage_latency_s,
            config.fetch_workers,
            config.transfer_timeout_s,
            scale,
        ),
        faults=Faults(),
        workload=workload,
        storage=Storage(attach=0 if storage else None),
        checked=False,
    )
