"""The models that are run: a real one, and small random ones with recurrent state, with what drafts for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hicache.bench.pressure.plan import Load, Setting
from hicache.builder import ModelDescription
from hicache.config import CacheConfig, ServeConfig, Settings
from hicache.coverage import Checkpoint
from hicache.device.torch import RESERVED_SLOTS
from hicache.engine.checkpoint import open_checkpoint
from hicache.engine.default_model import DEFAULT_MODEL, find_model
from hicache.engine.drafts import DraftSettings, plan_draft
from hicache.testing.families import write_tiny
from hicache.units import PoolName

_FULL, _LINEAR = "full_attention", "linear_attention"
_DRAFT_TOKENS = 3
_SPARE_SNAPSHOTS = 2
"""Snapshots on the device beside the live states, where memory is short: as few as a cache takes."""
_SNAPSHOT_PAGES = 2
"""Pages between two snapshots of a prompt."""
_NO_STATE = 0.25


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint, what drafts for it if anything does, and what it is asked."""

    name: str
    folder: Path
    draft: str | None
    load: Load
    threads: int | None
    cache_folder: Path

    def describe(self) -> tuple[ModelDescription, int]:
        """Its pools, those of the draft included, and how many tokens there are."""
        checkpoint = open_checkpoint(self.folder, "float32", self.load.page_size)
        if self.draft is None:
            return checkpoint.description, checkpoint.vocabulary
        asked = DraftSettings(self.draft, _DRAFT_TOKENS, "float32", self.load.page_size, self.cache_folder)
        return plan_draft(asked, checkpoint).description, checkpoint.vocabulary

    def carried(self) -> dict[PoolName, tuple[PoolName, ...]]:
        """The pools with slots of their own, and with each those that live at its slots."""
        pools = self.describe()[0].pools
        return {
            pool.name: tuple(other.name for other in pools if other.derived_from == pool.name)
            for pool in pools
            if pool.derived_from is None
        }

    def settings(self, setting: Setting) -> Settings:
        """What `hicache serve` would be told."""
        load = self.load
        device_size, host_size, share = self._sizes(setting)
        return Settings(
            cache=CacheConfig(
                device_size=device_size,
                host_size=host_size,
                page_size=load.page_size,
                checkpoint_share=share,
                storage_url="memory:" if setting.host == "little" else None,
                write_policy=_write_policy(setting),
                write_through_hits=1 << 30,
                write_back_watermark=1.0,
            ),
            serve=ServeConfig(
                model=str(self.folder),
                cache_folder=self.cache_folder,
                max_running=load.running,
                max_model_len=load.longest_request,
                chunk_tokens=load.chunk_tokens,
                snapshot_interval=_SNAPSHOT_PAGES * load.page_size,
                preemption=setting.preemption,
                draft=self.draft,
                draft_tokens=_DRAFT_TOKENS,
                threads=self.threads,
            ),
        )

    def _sizes(self, setting: Setting) -> tuple[int, int, float]:
        """Bytes of device and host memory, and the share of snapshots in both."""
        load, description = self.load, self.describe()[0]
        state = sum(pool.slot_bytes for pool in description.pools if isinstance(pool.coverage, Checkpoint))
        page = description.slot_bytes - state
        pages, snapshots = load.device_pages(setting), load.running + _SPARE_SNAPSHOTS
        if setting.share >= 1:
            snapshots += load.running * load.longest_pages // _SNAPSHOT_PAGES
        states = snapshots * state + state // 64  # rounding must not make it one less
        room = pages * page + states
        share = states / room if state else _NO_STATE
        host_size = load.host_pages(setting) * page / (1 - share if state else 1) + state
        return room + RESERVED_SLOTS * description.slot_bytes, int(host_size), share


def _write_policy(setting: Setting) -> Literal["write_through", "write_through_selective", "write_back"]:
    if setting.host == "none":
        return "write_through_selective"
    return "write_through" if setting.copied == "when computed" else "write_back"


def real_model(load: Load) -> Subject:
    """SmolLM2, fetched if it is not there. It keeps keys and values only."""
    cache_folder = ServeConfig().cache_folder
    folder = find_model(DEFAULT_MODEL, cache_folder)
    return Subject("SmolLM2-135M-Instruct", folder, None, load, None, cache_folder)


def hybrid(folder: Path, load: Load, threads: int | None, size: int) -> Subject:
    """A random model of the family qwen3_next, whose first layer drafts for it. `size`: 1 for a tiny one."""
    layers = 4 * size
    changes = {
        "hidden_size": 64 * size,
        "num_hidden_layers": layers,
        "head_dim": 16 * size,
        "linear_key_head_dim": 8 * size,
        "linear_value_head_dim": 16 * size,
        "layer_types": [_FULL, _LINEAR, _LINEAR, _LINEAR] * size,
    }
    model = write_tiny("qwen3_next", folder / "hybrid", changes=changes)
    return Subject("qwen3_next, random", model, "first-layers:1", load, threads, folder)


def recurrent(folder: Path, load: Load, threads: int | None, size: int) -> Subject:
    """A random Mamba-2 model without any attention; a random llama drafts for it, in a pool of its own."""
    model = write_tiny("mamba2", folder / "recurrent", changes={"num_hidden_layers": 4 * size})
    draft = write_tiny("llama", folder / "draft", changes={"num_hidden_layers": 1})
    return Subject("mamba2, random", model, str(draft), load, threads, folder)
