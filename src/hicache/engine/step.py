"""One forward of the model over pooled state: it answers what the layers of transformers ask of their cache.

Made for one forward. A layer's state is written to slots as it comes; recurrent state only when the step is kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hicache.device.torch import TorchDevicePool
from hicache.engine.attention import Scoring, attend
from hicache.engine.routes import Routes
from hicache.engine.rows import Rows
from hicache.engine.states import CONV, RECURRENT, StateStep
from hicache.engine.token_pools import KV_BLOCK_TOKENS, Scratch, TokenPoolStep
from hicache.errors import InvariantError
from hicache.units import PoolName

_KEY, _VALUE = 0, 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a model's state lies: its pools by name, which layer uses which, and room to gather in."""

    pools: Mapping[PoolName, TorchDevicePool]
    routes: Routes
    scratch: Scratch


class Step:
    """`before_layer(layer)` returns when what was loaded of that layer is there; it is called once per layer."""

    def __init__(self, memory: Memory, rows: Rows, before_layer: Callable[[int], None]) -> None:
        routes = memory.routes
        self.rows = rows
        self.states = {name: StateStep(name, memory.pools[name], rows) for name in routes.state_pools}
        self._routes = routes
        self._scratch = memory.scratch
        block = 1 if routes.indexers else KV_BLOCK_TOKENS
        self._tokens = {
            name: TokenPoolStep(memory.pools[name], routes.sources[name], sight, rows, block)
            for name, sight in routes.sights.items()
        }
        self._before_layer = before_layer
        self._arrived = -1
        self._updated: int | None = None

    def mask(self) -> torch.Tensor | None:
        """What a model with an indexer must be told: what every row sees, bool [batch, 1, width, tokens]."""
        if not self._routes.indexers:
            return None
        pool, _ = next(iter(self._routes.latents.values()))
        return self._tokens[pool].joint_mask()

    def commit(self) -> None:
        """Keep the recurrent state that the forward has left."""
        for state in self.states.values():
            state.commit()

    # What the layers of transformers ask of a cache

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a layer's new keys and values, [batch, heads, width, dim] each.

        Latents come back for all tokens that are seen; keys and values as they are, since `attend` gathers them.
        """
        self._arrive(layer_idx)
        if layer_idx in self._routes.latents:
            pool, own = self._routes.latents[layer_idx]
            step = self._tokens[pool]
            for part, new in ((_KEY, keys), (_VALUE, values)):
                step.write(own, part, self._by_row(new)[:, 0])
            self._updated = layer_idx
            latents, ropes = (step.gather_all(own, part)[:, None] for part in (_KEY, _VALUE))
            return latents, ropes
        pool, own = self._routes.attention[layer_idx]
        for part, new in ((_KEY, keys), (_VALUE, values)):
            self._tokens[pool].write(own, part, self._by_row(new))
        self._updated = layer_idx
        return keys, values

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Stores a layer's new indexer keys [batch, width, dim]; returns those of all tokens that are seen."""
        self._arrive(layer_idx)
        pool, own = self._routes.indexers[layer_idx]
        self._tokens[pool].write(own, 0, keys.reshape(self.rows.count, -1))
        return self._tokens[pool].gather_all(own, 0)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The inputs [batch, channels, width] that a layer's convolution still sees; None at the start of sequences."""
        return self._state(layer_idx).get(self._routes.states[layer_idx][1], CONV)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Takes a convolution's new inputs [batch, channels, tokens]; returns them with those before them."""
        return self._state(layer_idx).extend_conv(self._routes.states[layer_idx][1], conv_states)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A layer's recurrent state [batch, ...]; None at the start of sequences."""
        return self._state(layer_idx).get(self._routes.states[layer_idx][1], RECURRENT)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Takes a layer's new recurrent state [batch, ...]."""
        return self._state(layer_idx).put(self._routes.states[layer_idx][1], RECURRENT, recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: a step that is not kept leaves no trace."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this step, where it has one sequence; a step with several is told positions instead."""
        return self.rows.segments[0].start if len(self.rows.segments) == 1 else 0

    def attend(
        self,
        layer_idx: int | None,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of all rows, [batch, width, heads, dim]; `query` is [batch, heads, width, dim].

        The layer is the one just updated, else (it reads what another layer wrote) `layer_idx`. `indices`
        [batch, width, n] are the only tokens that may be looked at, if given.
        """
        layer = self._updated if self._updated is not None else layer_idx
        self._updated = None
        if layer is None:
            raise InvariantError("attention was asked for by a module that names no layer and updated none")
        if layer in self._routes.latents:
            return self._attend_latents(layer, query, keys, values, scoring, indices)
        pool, own = self._routes.attention[layer]
        self._arrive(layer)
        step = self._tokens[pool]
        result = query.new_zeros(self.rows.count, query.shape[1], values.shape[-1])
        for index, read in enumerate(step.reads):
            key, value = (step.gather(own, part, read, self._scratch).transpose(0, 1)[None] for part in (_KEY, _VALUE))
            rows = self._query_rows(query, index)
            attended = attend(rows, key, value, read.bias, scoring)
            result[self.rows.firsts[index] : self.rows.firsts[index] + rows.shape[2]] = attended
        return result.view(self.rows.batch, self.rows.width, *result.shape[1:])

    def _attend_latents(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
        indices: torch.Tensor | None,
    ) -> torch.Tensor:
        step = self._tokens[self._routes.latents[layer][0]]
        result = query.new_zeros(self.rows.count, query.shape[1], values.shape[-1])
        for index, (read, (line, place)) in enumerate(zip(step.reads, step.places(), strict=True)):
            rows = self._query_rows(query, index)
            part = slice(place, place + read.kv_tokens)
            bias = read.bias
            if indices is not None:
                chosen = self._chosen(indices, index, rows.shape[2], keys.shape[2])[:, part]
                bias = bias.clone()
                bias[: rows.shape[2]].masked_fill_(~chosen, float("-inf"))
            key, value = keys[line : line + 1, :, part], values[line : line + 1, :, part]
            attended = attend(rows, key, value, bias, scoring)
            result[self.rows.firsts[index] : self.rows.firsts[index] + rows.shape[2]] = attended
        return result.view(self.rows.batch, self.rows.width, *result.shape[1:])

    def _chosen(self, indices: torch.Tensor, index: int, rows: int, tokens: int) -> torch.Tensor:
        first = self.rows.firsts[index]
        chosen = indices.reshape(self.rows.count, -1)[first : first + rows].long()
        return torch.zeros(rows, tokens, dtype=torch.bool).scatter_(1, chosen, True)

    def _query_rows(self, query: torch.Tensor, index: int) -> torch.Tensor:
        first = self.rows.firsts[index]
        if self.rows.batch > 1:
            return query[first : first + 1]
        return query[:, :, first : first + len(self.rows.segments[index].token_ids)]

    def _by_row(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, width, dim] as [rows, heads, dim]."""
        return tensor.transpose(1, 2).reshape(self.rows.count, tensor.shape[1], tensor.shape[3])

    def _state(self, layer: int) -> StateStep:
        self._arrive(layer)
        return self.states[self._routes.states[layer][0]]

    def _arrive(self, layer: int) -> None:
        while self._arrived < layer:
            self._arrived += 1
            self._before_layer(self._arrived)
