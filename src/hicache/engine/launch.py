"""From settings to a running engine: what can't work is refused in one line before the weights are read."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from hicache.builder import ModelDescription, breaker_options, build_kv_cache, describe_sizes, split_sizes
from hicache.cache import UnifiedRadixCache
from hicache.cache.room import most_chunk
from hicache.config import Settings, format_size
from hicache.coverage import Full
from hicache.device.torch import RESERVED_SLOTS, TorchDevicePool, torch_dtype
from hicache.engine.checkpoint import Checkpoint, open_checkpoint
from hicache.engine.core import EngineCore
from hicache.engine.default_model import find_model
from hicache.engine.drafts import DraftCheckpoint, DraftPlan, DraftSettings, plan_draft
from hicache.engine.engine import Engine, EngineInfo
from hicache.engine.executor import Executor
from hicache.engine.model import Tokenizer, load_model, load_tokenizer
from hicache.engine.routes import Routes
from hicache.engine.selftest import is_exact
from hicache.engine.token_pools import scratch_bytes
from hicache.engine.weights import Weights
from hicache.engine.work import CoreOptions
from hicache.errors import ConfigError
from hicache.keys import FingerprintMemo, Namespace, digest_parts
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
    plan = _plan(settings, open_checkpoint(folder, serve.dtype, config.page_size))
    require_memory(
        plan.weights_bytes + _scratch_bytes(plan) + config.device_size + config.host_size,
        "the model's weights, device_size and host_size together",
    )
    tokenizer = load_tokenizer(folder)
    pools: dict[PoolName, TorchDevicePool] = {}

    def device_pool(name: str, geometry: PoolGeometry, slots: int) -> TorchDevicePool:
        pools[name] = TorchDevicePool.page_first(name, geometry, slots)
        return pools[name]

    cache = build_kv_cache(
        plan.description,
        config,
        device_pool=device_pool,
        reserved_slots=RESERVED_SLOTS,
        live_slots=serve.max_running,
    )
    with ExitStack() as undo:
        undo.callback(cache.close)
        engine = _start(plan, tokenizer, cache, pools)
        undo.pop_all()
    return engine


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is going to run: the model, and what drafts for it."""

    settings: Settings
    checkpoint: Checkpoint
    draft: DraftPlan | None

    @property
    def description(self) -> ModelDescription:
        """All pools, the draft's included."""
        return self.draft.description if self.draft is not None else self.checkpoint.description

    @property
    def weights_bytes(self) -> int:
        return self.checkpoint.weights_bytes + (self.draft.weights_bytes if self.draft is not None else 0)

    @property
    def slots(self) -> Mapping[PoolName, int]:
        """Device slots by pool."""
        sizes = split_sizes(
            self.description,
            self.settings.cache,
            reserved_slots=RESERVED_SLOTS,
            live_slots=self.settings.serve.max_running,
        )
        return sizes.device

    @property
    def draft_folder(self) -> Path | None:
        """The folder of the draft's own weights, if it has any."""
        return self.draft.checkpoint.folder if isinstance(self.draft, DraftCheckpoint) else None

    def namespace(self) -> Namespace:
        """What sets its pages apart, from those with another draft too."""
        serve = self.settings.serve
        memo = FingerprintMemo(serve.cache_folder / "weights.json")
        own = self.checkpoint.namespace(serve.dtype, self.settings.cache.page_size, memo)
        if self.draft is None:
            return own
        return replace(
            own,
            weights=digest_parts({"model": own.weights, "draft": self.draft.identity(memo)}).hex(),
            geometry=self.description.fingerprint,
            draft_lookahead=self.description.draft_lookahead,
        )


def _plan(settings: Settings, checkpoint: Checkpoint) -> _Plan:
    serve = settings.serve
    if serve.draft is None:
        return _Plan(settings, checkpoint, None)
    asked = DraftSettings(serve.draft, serve.draft_tokens, serve.dtype, settings.cache.page_size, serve.cache_folder)
    return _Plan(settings, checkpoint, plan_draft(asked, checkpoint))


def _candidate(plan: _Plan, folder: str, draft: str | None) -> _Plan:
    """The same plan over other weights."""
    serve, config = plan.settings.serve, plan.settings.cache
    if draft is not None and not isinstance(plan.draft, DraftCheckpoint):
        raise ConfigError(f"draft={draft}: no checkpoint of its own drafts here, so there are no weights to exchange")
    settings = plan.settings if draft is None else plan.settings.replace(serve=serve.replace(draft=draft))
    return _plan(settings, open_checkpoint(find_model(folder, serve.cache_folder), serve.dtype, config.page_size))


def _start(
    plan: _Plan, tokenizer: Tokenizer, cache: UnifiedRadixCache, pools: Mapping[PoolName, TorchDevicePool]
) -> Engine:
    """Loads the weights and runs on a cache that is there."""
    checkpoint, serve, config = plan.checkpoint, plan.settings.serve, plan.settings.cache
    max_model_len = _max_model_len(plan)
    namespace = plan.namespace()
    model = load_model(checkpoint.folder, torch_dtype(serve.dtype))
    executor = Executor(model, checkpoint.description, pools, max_model_len)
    drafter = plan.draft.start(model, pools, max_model_len) if plan.draft is not None else None
    exact = is_exact(executor, checkpoint.vocabulary)
    if executor.routes.state_pools:
        log.info("recurrent state is computed in pieces: chunking may change the last bits of logits")
    elif not exact:
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
            *((plan.draft.shown,) if plan.draft is not None else ()),
            f"working memory: {format_size(_scratch_bytes(plan))}",
            *describe_sizes(
                plan.description, config, reserved_slots=RESERVED_SLOTS, live_slots=serve.max_running
            ).splitlines(),
        ),
    )
    options = CoreOptions(
        serve.max_running,
        _chunk_tokens(plan),
        snapshot_interval=serve.snapshot_interval,
        retract=serve.preemption == "retract",
        priority_ageing_s=serve.priority_ageing_s,
        breaker=breaker_options(config),
    )
    weights = Weights(plan, model, drafter, serve.dtype, partial(_candidate, plan))
    return Engine(EngineCore(cache, executor, options, drafter=drafter), tokenizer, info, serve.max_waiting, weights)


def _max_model_len(plan: _Plan) -> int:
    """Tokens of prompt and answer together: what is asked for, else what the model and the device pools allow."""
    config, asked, slots = plan.settings.cache, plan.settings.serve.max_model_len, plan.slots
    whole = [slots[pool.name] for pool in plan.description.pools if isinstance(pool.coverage, Full)]
    most = plan.checkpoint.max_positions
    pool_tokens = min(whole) * config.page_size if whole else most
    if asked is None:
        return max(1, min(most, pool_tokens))
    if asked > most:
        raise ConfigError(f"max_model_len={asked}: the model was made for {most} at most")
    if asked > pool_tokens:
        need = config.device_size * -(-asked // config.page_size) // min(whole) + plan.description.slot_bytes
        raise ConfigError(
            f"max_model_len={asked}: device_size={format_size(config.device_size)} holds {pool_tokens} tokens;"
            f" give it {format_size(need)} or more"
        )
    return asked


def _chunk_tokens(plan: _Plan) -> int:
    """Prompt tokens per step: no more than a windowed pool has room for beside the window."""
    page_size, model = plan.settings.cache.page_size, plan.description
    coverages = {pool.name: pool.coverage for pool in model.pools}
    most = most_chunk(coverages, plan.slots, page_size, model.draft_lookahead)
    return fitting_chunk(plan.settings.serve.chunk_tokens, most, page_size)


def fitting_chunk(asked: int, most: int | None, page_size: int) -> int:
    """A page at least, and what was asked for, in whole pages of the `most` that fit; less where not even one does."""
    if most is None:
        return max(page_size, asked)
    if 0 < most < page_size:
        return most
    return max(page_size, min(asked, most // page_size * page_size))


def _scratch_bytes(plan: _Plan) -> int:
    """What the model and its drafter gather in."""
    routes = [Routes.of(plan.checkpoint.description)]
    if plan.draft is not None:
        routes.append(plan.draft.routes)
    geometries = {pool.name: pool.geometry for pool in plan.description.pools}
    max_model_len = _max_model_len(plan)
    return sum(scratch_bytes([geometries[pool] for pool in one.gathered_pools], max_model_len) for one in routes)


def _model_name(model: str) -> str:
    """A hub id as it is; of a folder its last name."""
    path = Path(model).expanduser()
    return path.absolute().name if path.is_dir() else model
