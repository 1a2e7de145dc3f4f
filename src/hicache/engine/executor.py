"""Runs a step: many sequences, each with a chunk of tokens, through the layers at once. It decides nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hicache.builder import ModelDescription
from hicache.device.torch import TorchDevicePool
from hicache.engine.model import CausalModel
from hicache.engine.routes import Routes
from hicache.engine.rows import Rows
from hicache.engine.segment import Segment, StateSlots
from hicache.engine.states import copy_state
from hicache.engine.step import Memory, Step
from hicache.engine.token_pools import Scratch
from hicache.units import PoolName


@dataclass(frozen=True, slots=True)
class Output:
    """What came of one segment: logits of its last tokens, float32 [logit_rows, vocabulary], and of all its tokens
    the model's last hidden state [tokens, hidden size]. `step` and `line` say where its recurrent state is."""

    logits: torch.Tensor
    hidden: torch.Tensor
    step: Step
    line: int

    def keep_state(self, slots: StateSlots) -> None:
        """Keep the recurrent state after the segment's last token in `slots` after all."""
        for name, state in self.step.states.items():
            state.commit_to(slots[name], self.line)


class Executor:
    """One model over its device pools."""

    def __init__(
        self,
        model: CausalModel,
        description: ModelDescription,
        pools: Mapping[PoolName, TorchDevicePool],
        max_model_len: int,
    ) -> None:
        self._model = model
        self._routes = Routes.of(description)
        gathered = [pools[name].geometry for name in self._routes.gathered_pools]
        self._memory = Memory(pools, self._routes, Scratch(gathered, max_model_len))

    @property
    def model(self) -> CausalModel:
        """What it runs."""
        return self._model

    @property
    def scratch_bytes(self) -> int:
        """Memory held beside the weights and the pools."""
        return self._memory.scratch.nbytes

    @property
    def pools(self) -> Mapping[PoolName, TorchDevicePool]:
        """Where the state lies."""
        return self._memory.pools

    @property
    def routes(self) -> Routes:
        """Which layer works on which pool."""
        return self._routes

    def run(
        self, segments: Sequence[Segment], before_layer: Callable[[int], None] = lambda layer: None
    ) -> list[Output]:
        """Computes all segments; their tokens' state is in their slots afterwards. One output per segment.

        Running segments again changes nothing as long as they don't read recurrent state from where they keep it. When
        a forward fails, no recurrent state was kept of any.
        """
        outputs: dict[int, Output] = {}
        steps = []
        for forward in self._forwards(segments):
            step = Step(self._memory, forward.rows, before_layer)
            steps.append(step)
            logits, hidden = self._model.forward(step)
            outputs.update(_outputs(forward, step, logits, hidden))
        for step in steps:
            step.commit()
        return [outputs[index] for index in range(len(segments))]

    def copy_state(self, source: StateSlots, to: StateSlots) -> None:
        """Copies the recurrent state in some slots to others."""
        copy_state({name: self._memory.pools[name] for name in self._routes.state_pools}, source, to)

    def _forwards(self, segments: Sequence[Segment]) -> list["_Forward"]:
        everyone = list(range(len(segments)))
        if self._routes.states:
            single = [i for i in everyone if len(segments[i].token_ids) == 1 and segments[i].state_from is not None]
            forwards = [_Forward(Rows.flat([segments[i]], block=1), (i,)) for i in everyone if i not in single]
            if single:
                forwards.append(_Forward(Rows.stacked([segments[i] for i in single]), tuple(single)))
            return forwards
        if self._routes.indexers or self._model.one_sequence_per_forward:
            return [_Forward(Rows.flat([segments[i]]), (i,)) for i in everyone]
        return [_Forward(Rows.flat(segments), tuple(everyone))]


@dataclass(frozen=True, slots=True)
class _Forward:
    """`indices[i]` is the place of segment i of `rows` among all segments of the step."""

    rows: Rows
    indices: tuple[int, ...]


def _outputs(forward: _Forward, step: Step, logits: torch.Tensor, hidden: torch.Tensor) -> dict[int, Output]:
    outputs = {}
    row = 0
    for line, (index, segment) in enumerate(zip(forward.indices, forward.rows.segments, strict=True)):
        first = forward.rows.firsts[line]
        states = hidden[first : first + len(segment.token_ids)]
        outputs[index] = Output(logits[row : row + segment.logit_rows], states, step, line)
        row += segment.logit_rows
    return outputs
