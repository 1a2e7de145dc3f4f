"""From settings to a running engine: what can't work is refused in one line before the weights are read."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from hicache.builder import PoolSizes, build_kv_cache, describe_sizes, split_sizes
from hicache.cache import UnifiedRadixCache
from hicache.config import Settings, format_size
from hicache.coverage import Full, Window
from hicache.device.torch import RESERVED_SLOTS, TorchDevicePool, torch_dtype
from hicache.engine.checkpoint import Checkpoint, open_checkpoint
from hicache.engine.core import CoreOptions, EngineCore
from hicache.engine.default_model import find_model
from hicache.engine.engine import Engine, EngineInfo
from hicache.engine.executor import Executor
from hicache.engine.model import Tokenizer, load_model, load_tokenizer
from hicache.engine.routes import Routes
from hicache.engine.selftest import is_exact
from hicache.engine.token_pools import scratch_bytes
from hicache.errors import ConfigError
from hicache.keys import FingerprintMemo
from hicache.layout import PoolGeometry
from hicache.memory import require_memory
from hicache.units import PoolName

log = logging.getLogger("hicache")


def create_engine(settings: Settings) -> Engine:
    """Finds or fetches the model, loads it, allocates, tests itself and starts.

    Raises ConfigError that says what to change. The engine closes its cache when it is closed.
    """
    serve, config = settings.serve, settings.cache
    if serve.threads is not None:
        torch.set_num_threads(serve.threads)
    folder = find_model(serve.model, serve.cache_folder)
    checkpoint = open_checkpoint(folder, serve.dtype, config.page_size)
    max_model_len = _max_model_len(settings, checkpoint)
    require_memory(
        checkpoint.weights_bytes + _scratch_bytes(checkpoint, max_model_len) + config.device_size + config.host_size,
        "the model's weights, device_size and host_size together",
    )
    tokenizer = load_tokenizer(folder)
    pools: dict[PoolName, TorchDevicePool] = {}

    def device_pool(name: str, geometry: PoolGeometry, slots: int) -> TorchDevicePool:
        pools[name] = TorchDevicePool.page_first(name, geometry, slots)
        return pools[name]

    cache = build_kv_cache(
        checkpoint.description,
        config,
        device_pool=device_pool,
        reserved_slots=RESERVED_SLOTS,
        live_slots=serve.max_running,
    )
    with ExitStack() as undo:
        undo.callback(cache.close)
        engine = _start(settings, checkpoint, tokenizer, cache, pools)
        undo.pop_all()
    return engine


def _start(
    settings: Settings,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    cache: UnifiedRadixCache,
    pools: Mapping[PoolName, TorchDevicePool],
) -> Engine:
    """Loads the weights and runs on a cache that is there."""
    serve, config = settings.serve, settings.cache
    max_model_len = _max_model_len(settings, checkpoint)
    memo = FingerprintMemo(serve.cache_folder / "weights.json")
    namespace = checkpoint.namespace(serve.dtype, config.page_size, memo)
    model = load_model(checkpoint.folder, torch_dtype(serve.dtype))
    executor = Executor(model, checkpoint.description, pools, max_model_len)
    exact = is_exact(executor, checkpoint.vocabulary)
    if not exact:
        log.warning("answers may depend on chunking and batch in their last bits: %s on this machine", serve.dtype)
    info = EngineInfo(
        model_name=_model_name(serve.model),
        max_model_len=max_model_len,
        vocabulary=checkpoint.vocabulary,
        end_of_text=checkpoint.end_of_text,
        namespace=namespace,
        exact=exact,
        sizes=(
            f"weights: {format_size(model.nbytes)}, {serve.dtype}",
            f"working memory: {format_size(executor.scratch_bytes)}",
            *describe_sizes(
                checkpoint.description, config, reserved_slots=RESERVED_SLOTS, live_slots=serve.max_running
            ).splitlines(),
        ),
    )
    options = CoreOptions(
        serve.max_running, _chunk_tokens(settings, checkpoint), snapshot_interval=serve.snapshot_interval
    )
    return Engine(EngineCore(cache, executor, options), tokenizer, info)


def _max_model_len(settings: Settings, checkpoint: Checkpoint) -> int:
    """Tokens of prompt and answer together: what is asked for, else what the model and the device pools allow."""
    config, asked = settings.cache, settings.serve.max_model_len
    slots = _sizes(settings, checkpoint).device
    whole = [slots[pool.name] for pool in checkpoint.description.pools if isinstance(pool.coverage, Full)]
    pool_tokens = min(whole) * config.page_size if whole else checkpoint.max_positions
    if asked is None:
        return max(1, min(checkpoint.max_positions, pool_tokens))
    if asked > checkpoint.max_positions:
        raise ConfigError(f"max_model_len={asked}: the model was made for {checkpoint.max_positions} at most")
    if asked > pool_tokens:
        need = config.device_size * -(-asked // config.page_size) // min(whole) + checkpoint.description.slot_bytes
        raise ConfigError(
            f"max_model_len={asked}: device_size={format_size(config.device_size)} holds {pool_tokens} tokens;"
            f" give it {format_size(need)} or more"
        )
    return asked


def _chunk_tokens(settings: Settings, checkpoint: Checkpoint) -> int:
    """Prompt tokens per step: no more than a windowed pool has room for beside the window."""
    config, slots = settings.cache, _sizes(settings, checkpoint).device
    room = [
        (slots[pool.name] - pool.coverage.pages(config.page_size) - 1) * config.page_size
        for pool in checkpoint.description.pools
        if isinstance(pool.coverage, Window)
    ]
    return max(config.page_size, min([settings.serve.chunk_tokens, *room]))


def _sizes(settings: Settings, checkpoint: Checkpoint) -> PoolSizes:
    return split_sizes(
        checkpoint.description,
        settings.cache,
        reserved_slots=RESERVED_SLOTS,
        live_slots=settings.serve.max_running,
    )


def _scratch_bytes(checkpoint: Checkpoint, max_model_len: int) -> int:
    gathered = Routes.of(checkpoint.description).gathered_pools
    geometries = [pool.geometry for pool in checkpoint.description.pools if pool.name in gathered]
    return scratch_bytes(geometries, max_model_len)


def _model_name(model: str) -> str:
    """A hub id as it is; of a folder its last name."""
    path = Path(model).expanduser()
    return path.absolute().name if path.is_dir() else model
