"""A running model takes other weights of its shape whole, and its namespace changes with them; or it keeps its own."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hicache.config.explain import show
from hicache.device.torch import torch_dtype
from hicache.engine.checkpoint import Checkpoint, differences
from hicache.engine.draft_model import DraftModel
from hicache.engine.model import CausalModel, load_model, load_mtp
from hicache.engine.mtp import MtpDrafter
from hicache.engine.speculation import Drafter
from hicache.errors import ConfigError
from hicache.keys import Namespace
from hicache.memory import require_memory


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights that were loaded and fit. `take` puts them in place of the old ones, between two steps."""

    namespace: Namespace
    take: Callable[[], None]


class Candidate(Protocol):
    """A checkpoint, with a draft's, whose weights a running engine may take."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The model's."""

    @property
    def draft_folder(self) -> Path | None:
        """The draft's, if it has one of its own."""

    def namespace(self) -> Namespace:
        """What its pages are called; reads the weights unless it has read them before."""


class Weights:
    """What runs, and what it was loaded from. `open` finds and checks a checkpoint (and a draft's) as at the start."""

    def __init__(
        self,
        running: Candidate,
        model: CausalModel,
        drafter: Drafter | None,
        dtype: str,
        open_candidate: Callable[[str, str | None], Candidate],
    ) -> None:
        self._running = running
        self._model = model
        self._drafter = drafter
        self._dtype = torch_dtype(dtype)
        self._open = open_candidate

    def load(self, folder: str, draft: str | None) -> NewWeights:
        """Loads other weights beside those that run; takes a while, and any thread.

        Raises ConfigError, by name and with nothing changed, for what does not fit.
        """
        new = self._open(_there(folder), None if draft is None else _there(draft))
        require_same(self._running.checkpoint, new.checkpoint)
        require_memory(new.checkpoint.weights_bytes, "the new weights, beside the old ones")
        namespace = new.namespace()
        model = load_model(new.checkpoint.folder, self._dtype)
        _refuse(folder, self._model.misfit(model))
        copies = [lambda: self._model.copy_from(model), *self._draft_copies(model, new, draft)]
        if new.namespace() != namespace:
            raise ConfigError(f"{folder}: the weights changed while they were read; ask again when they are complete")

        def take() -> None:
            for copy in copies:
                copy()
            self._running = new

        return NewWeights(namespace, take)

    def _draft_copies(self, model: CausalModel, new: Candidate, draft: str | None) -> list[Callable[[], None]]:
        drafter = self._drafter
        if isinstance(drafter, MtpDrafter):
            layers, fresh = drafter.layers, load_mtp(model)
            _refuse(str(new.checkpoint.folder), layers.misfit(fresh))
            return [lambda: layers.copy_from(fresh)]
        if draft is not None and isinstance(drafter, DraftModel) and new.draft_folder is not None:
            own, other = drafter.model, load_model(new.draft_folder, self._dtype)
            _refuse(draft, own.misfit(other))
            return [lambda: own.copy_from(other)]
        return []


def _there(folder: str) -> str:
    """Only a folder of this machine will do: nothing is downloaded into a running server."""
    try:
        found = Path(folder).expanduser().is_dir()
    except OSError:
        found = False
    if not found:
        raise ConfigError(f"{show(folder)}: there is no such folder on this machine; give one that holds a checkpoint")
    return folder


def require_same(old: Checkpoint, new: Checkpoint) -> None:
    """Raises ConfigError that names what differs, unless two checkpoints differ in their weights alone."""
    fields = differences(old.folder, new.folder)
    if fields:
        raise ConfigError(
            f"{new.folder}: its config.json differs from that of the model that runs in {', '.join(fields)};"
            " only weights can be exchanged, start a server for another model"
        )
    if new.end_of_text != old.end_of_text:
        raise ConfigError(f"{new.folder}: other tokens end an answer than in the model that runs")


def _refuse(name: str, misfit: str | None) -> None:
    if misfit is not None:
        raise ConfigError(f"{name}: these weights do not fit the model that runs: {misfit}")
