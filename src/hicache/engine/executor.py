"""Runs a step: many sequences, each with a chunk of tokens, through the layers at once. It decides nothing."""

from collections.abc import Callable, Sequence

import torch

from hicache.device.torch import TorchDevicePool
from hicache.engine.attention import PagedStep, Scratch, Segment
from hicache.engine.model import CausalModel


class Executor:
    """One model over one device pool."""

    def __init__(self, model: CausalModel, pool: TorchDevicePool, max_model_len: int) -> None:
        self._model = model
        self._pool = pool
        self._scratch = Scratch(pool, max_model_len)

    @property
    def scratch_bytes(self) -> int:
        """Memory held beside the weights and the pool."""
        return self._scratch.nbytes

    @property
    def pool(self) -> TorchDevicePool:
        """Where keys and values lie."""
        return self._pool

    def run(
        self, segments: Sequence[Segment], before_layer: Callable[[int], None] = lambda layer: None
    ) -> torch.Tensor:
        """Logits after the last token of each segment: float32 [len(segments), vocabulary].

        The new tokens' keys and values are in the segments' slots afterwards. Running a segment again changes nothing.
        """
        step = PagedStep(self._pool, self._scratch, segments, before_layer)
        return self._model.forward(step)[: len(segments)]
