"""From a model and a config to a cache: everything is checked and printed before any memory is taken."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from hicache.builder.describe import ModelConfig, ModelDescription, describe_model
from hicache.builder.entries import DevicePoolFactory, make_entry
from hicache.builder.ranks import RankPlan, agree_on, local_ranks, plan_of, said_by_ranks
from hicache.builder.sizes import split_sizes
from hicache.cache import UnifiedRadixCache
from hicache.config import CacheConfig, format_size, redact
from hicache.controller import Agree, ControllerConfig, HybridCacheController, OneRank, Patience
from hicache.device.array import ArrayDevicePool
from hicache.errors import ConfigError, StorageError
from hicache.memory import ArenaKind
from hicache.pools import SlotAllocator
from hicache.storage import BreakerOptions, PageStore, open_store
from hicache.storage.codec import HEADER_BYTES
from hicache.transfer import Executor, ThreadExecutor
from hicache.tree import POLICIES, EvictionPolicy

log = logging.getLogger("hicache")


def build_kv_cache(
    model_config: ModelConfig,
    config: CacheConfig,
    *,
    dtype: str | None = None,
    device_pool: DevicePoolFactory = ArrayDevicePool.page_first,
    reserved_slots: int = 0,
    live_slots: int = 1,
    device_in_host_memory: bool = True,
    executor: Executor | None = None,
    clock: Callable[[], float] = time.monotonic,
    agree: Agree | None = None,
    policy: EvictionPolicy | None = None,
) -> UnifiedRadixCache:
    """A cache for a model: its pools on device and host, a tree, transfers, and the store that `config` names.

    `dtype` overrides the config's; `device_pool` makes device memory (an engine with tensors of its own gives a
    factory that wraps them), out of host memory or not; the first `reserved_slots` slots of every device pool are
    never handed out. `live_slots` requests may run at a time, each with a recurrent state of its own. `policy`
    is an eviction policy of one's own, for this cache alone, in place of the one that the config names. Raises
    ConfigError, in one line and before memory is taken, when model and sizes don't fit this machine. A store that
    can't be opened is named by `health`; the cache runs without it.

    With several ranks (`agree`) every one of them calls this at once. `host_size` is for all ranks of a machine, which
    get equal parts of it; `device_size` is for each. All get the slots of the smallest, and all or none use storage.
    A ConfigError is then the same on every rank.
    """
    agree = agree if agree is not None else OneRank()
    policy = policy if policy is not None else POLICIES[config.eviction_policy]()
    local = local_ranks(agree)
    config = _share_of_host(config, local)
    memory = "device_size and host_size together" if device_in_host_memory else "host_size"

    def plan() -> tuple[ModelDescription, RankPlan]:
        model = describe_model(model_config, config.page_size, dtype)
        sizes = split_sizes(model, config, reserved_slots=reserved_slots, live_slots=live_slots)
        _require_storage_size(config, model)
        needed_bytes = config.host_size + (config.device_size if device_in_host_memory else 0)
        settings = _shared_settings(config, policy, model, reserved_slots, live_slots)
        return model, plan_of(model, sizes, settings, needed_bytes)

    model, agreed = agree_on(agree, plan, local, memory)
    sizes = agreed.sizes
    allocators = {
        pool.name: SlotAllocator(sizes.device[pool.name] + reserved_slots, reserved_slots)
        for pool in model.pools
        if pool.derived_from is None
    }
    with ExitStack() as undo:
        store = _open(config)
        if isinstance(store, PageStore):
            undo.callback(store.close)
        troubles = said_by_ranks(agree, store if isinstance(store, str) else None)
        kind = ArenaKind(config.host_arena)
        entries = []
        for pool in model.pools:
            slots = sizes.device[pool.name] + reserved_slots
            entry = make_entry(pool, device_pool, slots, sizes.host[pool.name], kind)
            undo.callback(entry.host_pool.close)
            own = allocators.get(pool.name)
            entries.append(entry if own is None else entry.with_device_allocator(own))
        controller = HybridCacheController(
            entries,
            model.layer_count,
            ControllerConfig(
                config.page_size,
                config.write_policy,
                config.prefetch_batch_pages,
                model.draft_lookahead,
                config.write_through_hits,
                config.write_back_watermark,
            ),
            executor if executor is not None else ThreadExecutor(config.fetch_workers),
            clock=clock,
            agree=agree,
            policy=policy,
            slot_bytes=agreed.slot_bytes,
        )
        undo.pop_all()
    cache = UnifiedRadixCache(
        controller,
        allocators,
        page_size=config.page_size,
        transfer_timeout_s=config.transfer_timeout_s,
        patience=Patience(
            config.prefetch_policy,
            config.prefetch_timeout_s,
            config.prefetch_page_timeout_s,
            config.prefetch_limit_s,
        ),
    )
    if troubles:
        cache.run_without_storage("; ".join(troubles))
    if isinstance(store, PageStore) and troubles:
        store.close()
    elif isinstance(store, PageStore):
        cache.attach_storage_backend(store)
    return cache


def _require_storage_size(config: CacheConfig, model: ModelDescription) -> None:
    page_bytes = max(HEADER_BYTES + pool.slot_bytes for pool in model.pools)
    if config.storage_size is not None and config.storage_size < page_bytes:
        raise ConfigError(
            f"storage_size={format_size(config.storage_size)} holds less than one page;"
            f" give it {format_size(page_bytes)} or more"
        )


def _share_of_host(config: CacheConfig, local: Sequence[int]) -> CacheConfig:
    """The config of one of the ranks of a machine."""
    if len(local) == 1:
        return config
    part = config.replace(host_size=max(1, config.host_size // len(local)))
    whole, each = format_size(config.host_size), format_size(part.host_size)
    log.info("ranks %s of this machine: host_size=%s in all, %s each", list(local), whole, each)
    return part


def _shared_settings(
    config: CacheConfig, policy: EvictionPolicy, model: ModelDescription, reserved_slots: int, live_slots: int
) -> dict[str, str | int | float | bool]:
    """What decisions follow from, so that ranks which differ in it would come to differ."""
    return {
        "page_size": config.page_size,
        "write_policy": config.write_policy,
        "write_through_hits": config.write_through_hits,
        "write_back_watermark": config.write_back_watermark,
        "eviction_policy": policy.name,
        "prefetch_batch_pages": config.prefetch_batch_pages,
        "transfer_timeout_s": config.transfer_timeout_s,
        "prefetch_policy": config.prefetch_policy,
        "prefetch_timeout_s": config.prefetch_timeout_s,
        "prefetch_page_timeout_s": config.prefetch_page_timeout_s,
        "prefetch_limit_s": config.prefetch_limit_s,
        "draft_lookahead": model.draft_lookahead,
        "reserved_slots": reserved_slots,
        "live_slots": live_slots,
        "storage_url is set": config.storage_url is not None,
    }


def breaker_options(config: CacheConfig) -> BreakerOptions:
    """When a store is left alone, as the settings say."""
    return BreakerOptions(config.storage_failures, config.storage_slow_s, config.storage_pause_s)


def _open(config: CacheConfig) -> PageStore | str | None:
    """The store that is asked for, or why it can't be used."""
    if config.storage_url is None:
        return None
    try:
        return PageStore(open_store(config.storage_url, cap=config.storage_size), breaker_options(config))
    except ConfigError as error:
        raise ConfigError(f"storage_url={redact(config.storage_url)}: {error}") from error
    except StorageError as error:
        log.warning("running without storage: %s", error)
        return str(error)
