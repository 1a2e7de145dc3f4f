"""Recurrent state in one forward: read from slots, changed beside them, and written back only when all went well."""

from collections.abc import Mapping

import torch
import torch.nn.functional as functional

from hicache.device.torch import ZERO_SLOT, TorchDevicePool
from hicache.engine.rows import Rows
from hicache.units import PoolName

CONV = "conv"
RECURRENT = "recurrent"


class StateStep:
    """The state of all rows' sequences, layer by layer: tensors [batch, *shape] as the layers of transformers use them.

    Either all sequences of a forward begin in it, and have no state yet, or none does.
    """

    def __init__(self, name: PoolName, pool: TorchDevicePool, rows: Rows) -> None:
        self._pool = pool
        self.begins = rows.segments[0].state_from is None
        padding = rows.batch - len(rows.segments)
        self._from = torch.tensor(
            [ZERO_SLOT if s.state_from is None else s.state_from[name] for s in rows.segments] + [ZERO_SLOT] * padding
        )
        kept = [(line, s.state_to[name]) for line, s in enumerate(rows.segments) if s.state_to is not None]
        self._kept_lines = torch.tensor([line for line, _ in kept], dtype=torch.int64)
        self._to = torch.tensor([slot for _, slot in kept], dtype=torch.int64)
        self._parts = [{spec.name: part for part, spec in enumerate(layer)} for layer in pool.geometry.layers]
        self._state: dict[tuple[int, str], torch.Tensor] = {}

    def get(self, layer: int, tensor: str) -> torch.Tensor | None:
        """A layer's state, to be read and, for a single token, changed in place; None for sequences that begin."""
        if (layer, tensor) not in self._state:
            if self.begins:
                return None
            source = self._pool.tensor(layer, self._parts[layer][tensor])
            self._state[layer, tensor] = torch.index_select(source, 0, self._from)[:, 0]
        return self._state[layer, tensor]

    def extend_conv(self, layer: int, inputs: torch.Tensor) -> torch.Tensor:
        """Takes a convolution's new inputs [batch, channels, tokens]; returns them with what came before them."""
        width = self._pool.geometry.layers[layer][self._parts[layer][CONV]].shape[-1]
        before = self.get(layer, CONV)
        if before is not None:
            inputs = torch.cat((before, inputs), -1)
        elif inputs.shape[-1] < width:
            inputs = functional.pad(inputs, (width - inputs.shape[-1], 0))
        self._state[layer, CONV] = inputs[..., -width:].clone()
        return inputs

    def put(self, layer: int, tensor: str, state: torch.Tensor) -> torch.Tensor:
        """Takes a layer's new state."""
        self._state[layer, tensor] = state
        return state

    def commit(self) -> None:
        """Writes the state after the forward to the slots of those segments that keep it."""
        if len(self._to):
            self._write(self._to, self._kept_lines)

    def commit_to(self, slot: int, line: int) -> None:
        """Writes one line's state to a slot after all."""
        self._write(torch.tensor([slot]), torch.tensor([line]))

    def _write(self, slots: torch.Tensor, lines: torch.Tensor) -> None:
        for (layer, tensor), state in self._state.items():
            target = self._pool.tensor(layer, self._parts[layer][tensor])
            target[slots, 0] = state[lines].to(target.dtype)


def copy_state(
    pools: Mapping[PoolName, TorchDevicePool], source: Mapping[PoolName, int], to: Mapping[PoolName, int]
) -> None:
    """Copies whole slots of state within each pool."""
    for name, pool in pools.items():
        for layer, specs in enumerate(pool.geometry.layers):
            for part in range(len(specs)):
                tensor = pool.tensor(layer, part)
                tensor[to[name]].copy_(tensor[source[name]])
