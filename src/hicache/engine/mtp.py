"""A checkpoint's MTP layers guess one token each; their state lies in the pages of the pool that they belong to.

The layer at depth d computes a row for the token at position p from the hidden state below it and from the token at
p + 1 + d. Depth 0 starts from the model's last hidden states, each depth goes on from the one before. Rows are final
once the tokens that all depths look ahead to are known; until then guesses stand in for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hicache.builder import ModelDescription, PoolDescription
from hicache.coverage import Full
from hicache.device.torch import TorchDevicePool
from hicache.engine.model import MtpLayers
from hicache.engine.routes import Routes
from hicache.engine.rows import Rows
from hicache.engine.segment import Segment, TokenArray
from hicache.engine.speculation import Lead, Trail, no_tokens
from hicache.engine.step import Memory, Step
from hicache.engine.token_pools import Scratch
from hicache.errors import ConfigError, InvariantError
from hicache.layout import PoolGeometry
from hicache.units import PoolName


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one sequence, from its trail's end up to position `stop`."""

    lead: Lead
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.lead.trail.ready

    def hidden(self) -> torch.Tensor:
        """The model's last hidden states of the rows' tokens."""
        if self.lead.trail.hidden is None:
            raise InvariantError("rows of tokens whose hidden states nobody has handed on")
        states: torch.Tensor = self.lead.trail.hidden
        return states[: self.count]

    def segment(self, depth: int, guesses: Sequence[int], logit_rows: int) -> Segment:
        """The rows at one depth, with the tokens that they look ahead to."""
        first = self.lead.trail.ready
        ahead = np.concatenate((self.lead.tokens[first + 1 :], np.array(guesses, np.uint32)))
        return Segment(ahead[depth : depth + self.count], first, self.lead.slots, logit_rows=logit_rows)


class MtpDrafter:
    """Guesses as many tokens as there are depths in use.

    `own` describes the layers' pool, which lies at the slots of another, as `mtp_description` does.
    """

    def __init__(
        self,
        layers: MtpLayers,
        own: ModelDescription,
        pools: Mapping[PoolName, TorchDevicePool],
        max_model_len: int,
    ) -> None:
        routes = Routes.of(own)
        gathered = [pools[name].geometry for name in routes.gathered_pools]
        self._layers = layers
        self._depths = own.layer_count
        self._source = next(iter(routes.sources.values()))
        self._memory = Memory(pools, routes, Scratch(gathered, max_model_len))

    @property
    def layers(self) -> MtpLayers:
        """What guesses."""
        return self._layers

    @property
    def source(self) -> PoolName:
        """The pool at whose slots its state lies."""
        return self._source

    @property
    def most(self) -> int:
        """The most tokens that it guesses at a time: one per depth."""
        return self._depths

    @property
    def lookahead(self) -> int:
        """A row depends on one more token per depth."""
        return self._depths

    def follow(self, trail: Trail, hidden: torch.Tensor) -> None:
        """Keep the model's last hidden states until the rows that start from them are final."""
        trail.hidden = hidden.clone() if trail.hidden is None else torch.cat((trail.hidden, hidden))

    def settle(self, leads: Sequence[Lead]) -> None:
        """Compute the rows whose tokens are all known. The last one waits for the guesses that it gives as well."""
        parts = [_Part(lead, self._final(lead, held_back=0 if _goes_on(lead) else 1)) for lead in leads]
        parts = [part for part in parts if part.count > 0]
        if parts:
            self._chain(parts, logit_rows=0)
        for part in parts:
            _keep_from(part.lead.trail, part.stop)

    def propose(self, leads: Sequence[Lead], counts: Sequence[int]) -> list[TokenArray]:
        """A guess of each depth, at most `counts[i]`. No guess where the model has computed nothing since the last."""
        parts = [part for lead in leads if (part := _Part(lead, lead.computed)).count > 0]
        guesses = dict(zip(map(id, (part.lead for part in parts)), self._chain(parts, logit_rows=1), strict=True))
        for part in parts:
            _keep_from(part.lead.trail, self._final(part.lead, held_back=0))
        none = no_tokens()
        return [guesses.get(id(lead), none)[:count] for lead, count in zip(leads, counts, strict=True)]

    def _final(self, lead: Lead, held_back: int) -> int:
        """Rows up to here depend on known tokens only."""
        known = min(lead.computed - held_back, len(lead.tokens) - self._depths)
        return max(lead.trail.ready, known)

    def _chain(self, parts: Sequence[_Part], logit_rows: int) -> list[TokenArray]:
        """Runs all depths over all parts; what each depth guesses after a part is the next one's last token."""
        guesses: list[list[int]] = [[] for _ in parts]
        if not parts:
            return []
        hidden = torch.cat([part.hidden() for part in parts])
        for depth in range(self._depths):
            rows = Rows.flat(
                [part.segment(depth, guess, logit_rows) for part, guess in zip(parts, guesses, strict=True)]
            )
            step = Step(self._memory, rows, lambda layer: None)
            hidden, logits = self._layers.forward(depth, hidden[: rows.used], step)
            if logit_rows:
                for guess, row in zip(guesses, logits, strict=True):
                    guess.append(int(row.argmax()))
        return [np.array(guess, np.uint32) for guess in guesses]


def with_mtp(model: ModelDescription, depths: int) -> ModelDescription:
    """The model with a layer per depth packed into the pages of its pool.

    Raises ConfigError for a model that keeps anything but one pool of keys and values, or latents, of all tokens.
    """
    owner = model.pools[0]
    if len(model.pools) > 1 or not isinstance(owner.coverage, Full):
        names = ", ".join(repr(pool.name) for pool in model.pools)
        raise ConfigError(f"the model keeps {names}; MTP layers are run beside one pool of full attention only")
    packed = _geometry(owner, depths)
    return replace(model, pools=(replace(owner, packed_drafts=(packed,)),), draft_lookahead=depths)


def mtp_description(model: ModelDescription, depths: int) -> ModelDescription:
    """The MTP layers by themselves: their pool, as the cache names it, at the slots of the model's."""
    owner = model.pools[0]
    pool = PoolDescription(
        f"{owner.name}.draft0", _geometry(owner, depths), tuple(range(depths)), derived_from=owner.name
    )
    return ModelDescription(depths, (pool,))


def _geometry(owner: PoolDescription, depths: int) -> PoolGeometry:
    return PoolGeometry.uniform(depths, owner.geometry.layers[-1], owner.geometry.tokens_per_slot)


def _goes_on(lead: Lead) -> bool:
    """Whether the model has more to compute before it chooses a token, or never will again."""
    return lead.ended or len(lead.tokens) - lead.computed != 1


def _keep_from(trail: Trail, ready: int) -> None:
    if trail.hidden is not None:
        trail.hidden = trail.hidden[ready - trail.ready :].clone()
    trail.ready = ready
