"""From settings to a running engine: what can't work is refused in one line before the weights are read."""

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from hicache.builder import build_kv_cache
from hicache.cache import UnifiedRadixCache
from hicache.config import Settings, format_size
from hicache.device.torch import RESERVED_SLOTS, TorchDevicePool, torch_dtype
from hicache.engine.attention import KV_BLOCK_TOKENS, padded
from hicache.engine.checkpoint import Checkpoint, open_checkpoint
from hicache.engine.core import CoreOptions, EngineCore
from hicache.engine.default_model import find_model
from hicache.engine.engine import Engine, EngineInfo
from hicache.engine.executor import Executor
from hicache.engine.model import Tokenizer, load_model, load_tokenizer
from hicache.engine.selftest import is_exact
from hicache.errors import ConfigError
from hicache.keys import FingerprintMemo
from hicache.layout import PoolGeometry
from hicache.memory import require_memory

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
    pools: list[TorchDevicePool] = []

    def device_pool(name: str, geometry: PoolGeometry, slots: int) -> TorchDevicePool:
        pools.append(TorchDevicePool.page_first(name, geometry, slots))
        return pools[-1]

    cache = build_kv_cache(checkpoint.description, config, device_pool=device_pool, reserved_slots=RESERVED_SLOTS)
    with ExitStack() as undo:
        undo.callback(cache.close)
        engine = _start(settings, checkpoint, tokenizer, cache, pools[0])
        undo.pop_all()
    return engine


def _start(
    settings: Settings, checkpoint: Checkpoint, tokenizer: Tokenizer, cache: UnifiedRadixCache, pool: TorchDevicePool
) -> Engine:
    """Loads the weights and runs on a cache that is there."""
    serve, config = settings.serve, settings.cache
    max_model_len = _max_model_len(settings, checkpoint)
    memo = FingerprintMemo(serve.cache_folder / "weights.json")
    namespace = checkpoint.namespace(serve.dtype, config.page_size, memo)
    model = load_model(checkpoint.folder, torch_dtype(serve.dtype))
    executor = Executor(model, pool, max_model_len)
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
            f"device kv: {pool.slots} pages of {config.page_size} tokens, {format_size(pool.nbytes)}",
        ),
    )
    options = CoreOptions(serve.max_running, serve.chunk_tokens)
    return Engine(EngineCore(cache, executor, options), tokenizer, info)


def _max_model_len(settings: Settings, checkpoint: Checkpoint) -> int:
    """Tokens of prompt and answer together: what is asked for, else what the model and the device pool allow."""
    config, asked = settings.cache, settings.serve.max_model_len
    slots = config.device_size // checkpoint.description.slot_bytes - RESERVED_SLOTS
    pool_tokens = slots * config.page_size
    if asked is None:
        return max(1, min(checkpoint.max_positions, pool_tokens))
    if asked > checkpoint.max_positions:
        raise ConfigError(f"max_model_len={asked}: the model was made for {checkpoint.max_positions} at most")
    if asked > pool_tokens:
        need = (-(-asked // config.page_size) + RESERVED_SLOTS) * checkpoint.description.slot_bytes
        raise ConfigError(
            f"max_model_len={asked}: device_size={format_size(config.device_size)} holds {pool_tokens} tokens;"
            f" give it {format_size(need)} or more"
        )
    return asked


def _scratch_bytes(checkpoint: Checkpoint, max_model_len: int) -> int:
    geometry = checkpoint.description.pools[0].geometry
    return (padded(max_model_len, KV_BLOCK_TOKENS) + KV_BLOCK_TOKENS) * sum(
        spec.token_bytes for spec in geometry.layers[0]
    )


def _model_name(model: str) -> str:
    """A hub id as it is; of a folder its last name."""
    path = Path(model).expanduser()
    return path.absolute().name if path.is_dir() else model
