"""What `draft` asks for is checked, and refused by name, before any weights are read."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hicache.builder import ModelDescription, with_draft
from hicache.device.torch import TorchDevicePool, torch_dtype
from hicache.engine.checkpoint import Checkpoint, open_checkpoint
from hicache.engine.default_model import find_model
from hicache.engine.draft_model import DraftModel, draft_description, first_layers
from hicache.engine.executor import Executor
from hicache.engine.model import CausalModel, load_model, load_mtp, load_vocabulary
from hicache.engine.mtp import MtpDrafter, mtp_description, with_mtp
from hicache.engine.routes import Routes
from hicache.engine.speculation import Drafter
from hicache.errors import ConfigError
from hicache.keys import FingerprintMemo
from hicache.units import PoolName

log = logging.getLogger("hicache")

_MTP = "mtp"
_FIRST_LAYERS = "first-layers:"
_ALL = "all"


class DraftPlan(Protocol):
    """A drafter that is going to run beside a model."""

    @property
    def description(self) -> ModelDescription:
        """The model's pools with the drafter's: what the cache is built for."""

    @property
    def routes(self) -> Routes:
        """The drafter's own way through these pools."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights that the model does not have already."""

    @property
    def shown(self) -> str:
        """What it is, in a line."""

    def identity(self, memo: FingerprintMemo) -> str:
        """What sets its state apart from that of other drafters of the same shape."""

    def start(self, model: CausalModel, pools: Mapping[PoolName, TorchDevicePool], max_model_len: int) -> Drafter:
        """The drafter of `model`, with its state in `pools`."""


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The first `layers` layers of the model itself, as its draft: it shows speculation without another checkpoint."""

    target: ModelDescription
    layers: int
    most: int

    @property
    def description(self) -> ModelDescription:
        """The model's pools with those of its first layers once more."""
        return with_draft(self.target, first_layers(self.target, self.layers))

    @property
    def routes(self) -> Routes:
        """The draft's own way through these pools."""
        return Routes.of(self._own)

    @property
    def weights_bytes(self) -> int:
        """None: the weights are the model's."""
        return 0

    @property
    def shown(self) -> str:
        """What it is, in a line."""
        return f"draft: the model's own first {self.layers} of {self.target.layer_count} layers (a demonstration)"

    def identity(self, memo: FingerprintMemo) -> str:
        """The number of layers: their weights are the model's."""
        return f"{_FIRST_LAYERS}{self.layers}"

    def start(self, model: CausalModel, pools: Mapping[PoolName, TorchDevicePool], max_model_len: int) -> Drafter:
        """The drafter, which shares the weights of `model`."""
        return DraftModel(Executor(model.first_layers(self.layers), self._own, pools, max_model_len), self.most)

    @property
    def _own(self) -> ModelDescription:
        return draft_description(self.description, self.target, first_layers(self.target, self.layers))


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A smaller model with the same tokens."""

    target: ModelDescription
    checkpoint: Checkpoint
    dtype: str
    most: int

    @property
    def description(self) -> ModelDescription:
        """The model's pools with the draft's."""
        return with_draft(self.target, self.checkpoint.description)

    @property
    def routes(self) -> Routes:
        """The draft's own way through these pools."""
        return Routes.of(self._own)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the draft's weights."""
        return self.checkpoint.weights_bytes

    @property
    def shown(self) -> str:
        """What it is, in a line."""
        return f"draft: {self.checkpoint.folder.name}"

    def identity(self, memo: FingerprintMemo) -> str:
        """Over the draft's config and weights."""
        own = self.checkpoint.namespace(self.dtype, self.target.pools[0].geometry.tokens_per_slot, memo)
        return own.fingerprint.hex()

    def start(self, model: CausalModel, pools: Mapping[PoolName, TorchDevicePool], max_model_len: int) -> Drafter:
        """Loads the draft's weights."""
        draft = load_model(self.checkpoint.folder, torch_dtype(self.dtype))
        return DraftModel(Executor(draft, self._own, pools, max_model_len), self.most)

    @property
    def _own(self) -> ModelDescription:
        return draft_description(self.description, self.target, self.checkpoint.description)


@dataclass(frozen=True, slots=True)
class Mtp:
    """The first `most` of the `there` MTP layers of the model's own checkpoint."""

    target: ModelDescription
    there: int
    most: int

    @property
    def description(self) -> ModelDescription:
        """The model's pool with the MTP layers packed into its pages."""
        return with_mtp(self.target, self._depths)

    @property
    def routes(self) -> Routes:
        """The MTP layers' own way through this pool."""
        return Routes.of(mtp_description(self.target, self._depths))

    @property
    def weights_bytes(self) -> int:
        """None: they are among the model's weights."""
        return 0

    @property
    def shown(self) -> str:
        """What it is, in a line."""
        return f"draft: {self._depths} of {self.there} MTP layers"

    def identity(self, memo: FingerprintMemo) -> str:
        """The number of layers: their weights are in the model's files."""
        return f"{_MTP}:{self._depths}"

    def start(self, model: CausalModel, pools: Mapping[PoolName, TorchDevicePool], max_model_len: int) -> Drafter:
        """Loads the MTP layers from where the model came from."""
        own = mtp_description(self.target, self._depths)
        return MtpDrafter(load_mtp(model), own, pools, max_model_len)

    @property
    def _depths(self) -> int:
        return min(self.there, self.most)


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """What the settings say: which draft, how many tokens at a time, and what it must fit."""

    draft: str
    most: int
    dtype: str
    page_size: int
    cache_folder: Path


def plan_draft(asked: DraftSettings, target: Checkpoint) -> DraftPlan:
    """The drafter that is asked for. Raises ConfigError, by name and with the reason, for one that can't be used."""
    try:
        return _plan(asked, target)
    except ConfigError as error:
        raise ConfigError(f"draft={asked.draft}: {error}") from error


def _plan(asked: DraftSettings, target: Checkpoint) -> DraftPlan:
    plan: DraftPlan
    if asked.draft == _MTP:
        if not target.mtp_layers:
            raise ConfigError(f"the checkpoint of model type {target.model_type!r} has no MTP layers")
        plan = Mtp(target.description, target.mtp_layers, asked.most)
    elif asked.draft.startswith(_FIRST_LAYERS):
        layers = _layers(asked.draft.removeprefix(_FIRST_LAYERS), target)
        plan = FirstLayers(target.description, layers, asked.most)
    else:
        draft = open_checkpoint(_folder(asked), asked.dtype, asked.page_size)
        _require_same_tokens(draft, target)
        plan = DraftCheckpoint(target.description, draft, asked.dtype, asked.most)
    _ = plan.description  # it refuses what does not fit
    log.info("%s", plan.shown)
    return plan


def _folder(asked: DraftSettings) -> Path:
    try:
        return find_model(asked.draft, asked.cache_folder)
    except ConfigError as error:
        raise ConfigError(
            f"it is neither {_MTP} nor {_FIRST_LAYERS}N, and no folder or hub id of a checkpoint; give one of these"
        ) from error


def _layers(given: str, target: Checkpoint) -> int:
    there = target.description.layer_count
    if given == _ALL or given == str(there):
        return there
    if not (given.isdecimal() and 1 <= int(given) <= there):
        raise ConfigError(f"the model has {there} layers; give {_FIRST_LAYERS}1 to {_FIRST_LAYERS}{there}")
    if target.joint_layer_inputs:
        raise ConfigError(
            f"model type {target.model_type!r} has one embedding for the inputs of all layers, so its first {given}"
            f" can't be run alone; give another draft, or {_FIRST_LAYERS}{_ALL} to try it out"
        )
    return int(given)


def _require_same_tokens(draft: Checkpoint, target: Checkpoint) -> None:
    if draft.vocabulary != target.vocabulary:
        raise ConfigError(
            f"the draft has {draft.vocabulary} tokens, the model {target.vocabulary}; a draft needs the model's own"
            " tokenizer"
        )
    ours, theirs = load_vocabulary(target.folder), load_vocabulary(draft.folder)
    if theirs is not None and ours != theirs:
        raise ConfigError("the draft's tokenizer has other tokens than the model's; a draft needs the model's own")
