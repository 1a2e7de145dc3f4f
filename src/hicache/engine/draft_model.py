"""A draft model guesses greedily; its state lies at its target's slots, so it goes wherever the target's goes."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from hicache.builder import ModelDescription, PoolDescription
from hicache.engine.executor import Executor
from hicache.engine.model import CausalModel
from hicache.engine.segment import Segment, TokenArray
from hicache.engine.speculation import Lead, Trail, confirmed, no_tokens
from hicache.layout import PoolGeometry
from hicache.units import PoolName


class DraftModel:
    """Guesses up to `most` tokens for many sequences at once.

    What it computes for tokens that are only guessed is overwritten later, unless they turn out right.
    """

    def __init__(self, executor: Executor, most: int) -> None:
        self._executor = executor
        self._most = most

    @property
    def model(self) -> CausalModel:
        """What guesses."""
        return self._executor.model

    @property
    def source(self) -> PoolName:
        """The pool at whose slots its state lies."""
        return next(iter(self._executor.routes.sources.values()))

    @property
    def most(self) -> int:
        """The most tokens that it guesses at a time."""
        return self._most

    @property
    def lookahead(self) -> int:
        """None: a token's state depends on what is before it."""
        return 0

    def follow(self, trail: Trail, hidden: torch.Tensor) -> None:
        """It has no use for the target's hidden states."""

    def settle(self, leads: Sequence[Lead]) -> None:
        """Run the tokens that the target has computed and it has not."""
        for lead in leads:
            _confirm(lead)
        behind = [lead for lead in leads if lead.trail.ready < lead.computed]
        if behind:
            self._executor.run([_segment(lead, lead.tokens[lead.trail.ready : lead.computed]) for lead in behind])
        for lead in behind:
            lead.trail.ready = lead.computed

    def propose(self, leads: Sequence[Lead], counts: Sequence[int]) -> list[TokenArray]:
        """The tokens that it would choose itself, `counts[i]` for each sequence."""
        for lead in leads:
            _confirm(lead)
        guesses = [[token] for token in self._next([_segment(lead, lead.tokens[lead.trail.ready :]) for lead in leads])]
        for lead in leads:
            lead.trail.ready = len(lead.tokens)
        for depth in range(1, max(counts)):
            longer = [index for index, count in enumerate(counts) if count > depth]
            segments = [_after(leads[index], guesses[index]) for index in longer]
            for index, token in zip(longer, self._next(segments), strict=True):
                guesses[index].append(token)
        for lead, guess in zip(leads, guesses, strict=True):
            lead.trail.tried = np.array(guess[:-1], np.uint32)
        return [np.array(guess, np.uint32) for guess in guesses]

    def _next(self, segments: Sequence[Segment]) -> list[int]:
        return [int(output.logits[-1].argmax()) for output in self._executor.run(segments)]


def draft_description(joined: ModelDescription, target: ModelDescription, draft: ModelDescription) -> ModelDescription:
    """The draft as its executor sees it: its own pools by their names and at the slots that they have in `joined`,
    which is the target with the draft."""
    pools = joined.pools[len(target.pools) :]
    first = pools[0].derived_from or pools[0].name
    return replace(
        draft,
        pools=tuple(
            replace(own, name=pool.name, derived_from=None if pool.name == first else first)
            for own, pool in zip(draft.pools, pools, strict=True)
        ),
    )


def first_layers(model: ModelDescription, layers: int) -> ModelDescription:
    """A model made of the first `layers` layers of `model`."""
    return ModelDescription(layers, tuple(part for pool in model.pools if (part := _first(pool, layers)) is not None))


def _first(pool: PoolDescription, layers: int) -> PoolDescription | None:
    kept = [layer for layer in pool.layers if layer < layers]
    if not kept:
        return None
    return replace(
        pool,
        geometry=PoolGeometry(pool.geometry.layers[: len(kept)], pool.geometry.tokens_per_slot),
        layers=tuple(kept),
        readers=tuple((reader, own) for reader, own in pool.readers if reader < layers),
    )


def _confirm(lead: Lead) -> None:
    lead.trail.ready += confirmed(lead)
    lead.trail.tried = no_tokens()


def _segment(lead: Lead, tokens: TokenArray) -> Segment:
    return Segment(tokens, lead.trail.ready, lead.slots)


def _after(lead: Lead, guess: Sequence[int]) -> Segment:
    return Segment(np.array(guess[-1:], np.uint32), len(lead.tokens) + len(guess) - 1, lead.slots)
