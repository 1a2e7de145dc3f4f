"""From a model and a config to a cache: everything is checked and printed before any memory is taken."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from hicache.builder.describe import ModelConfig, ModelDescription, describe_model
from hicache.builder.entries import DevicePoolFactory, make_entry
from hicache.builder.sizes import split_sizes
from hicache.cache import UnifiedRadixCache
from hicache.config import CacheConfig, format_size, redact
from hicache.controller import Agree, ControllerConfig, HybridCacheController, OneRank
from hicache.device.array import ArrayDevicePool
from hicache.errors import ConfigError, StorageError
from hicache.memory import ArenaKind, require_memory
from hicache.pools import SlotAllocator
from hicache.storage import PageStore, open_store
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
    """
    model = describe_model(model_config, config.page_size, dtype)
    sizes = split_sizes(model, config, reserved_slots=reserved_slots, live_slots=live_slots)
    _require_storage_size(config, model)
    _require_memory(config, device_in_host_memory)
    allocators = {
        pool.name: SlotAllocator(sizes.device[pool.name] + reserved_slots, reserved_slots)
        for pool in model.pools
        if pool.derived_from is None
    }
    with ExitStack() as undo:
        store = _open(config)
        if isinstance(store, PageStore):
            undo.callback(store.close)
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
            agree=agree if agree is not None else OneRank(),
            policy=policy if policy is not None else POLICIES[config.eviction_policy](),
        )
        undo.pop_all()
    cache = UnifiedRadixCache(
        controller,
        allocators,
        page_size=config.page_size,
        transfer_timeout_s=config.transfer_timeout_s,
        prefetch_timeout_s=config.prefetch_timeout_s,
    )
    if isinstance(store, PageStore):
        cache.attach_storage_backend(store)
    elif store is not None:
        cache.run_without_storage(str(store))
    return cache


def _require_storage_size(config: CacheConfig, model: ModelDescription) -> None:
    page_bytes = max(HEADER_BYTES + pool.slot_bytes for pool in model.pools)
    if config.storage_size is not None and config.storage_size < page_bytes:
        raise ConfigError(
            f"storage_size={format_size(config.storage_size)} holds less than one page;"
            f" give it {format_size(page_bytes)} or more"
        )


def _require_memory(config: CacheConfig, device_in_host_memory: bool) -> None:
    if device_in_host_memory:
        require_memory(config.device_size + config.host_size, "device_size and host_size together")
    else:
        require_memory(config.host_size, "host_size")


def _open(config: CacheConfig) -> PageStore | StorageError | None:
    """The store that is asked for, or why it can't be used."""
    if config.storage_url is None:
        return None
    try:
        return PageStore(open_store(config.storage_url, cap=config.storage_size))
    except ConfigError as error:
        raise ConfigError(f"storage_url={redact(config.storage_url)}: {error}") from error
    except StorageError as error:
        log.warning("running without storage: %s", error)
        return error
