"""What is measured, and what it is measured against: a tiny model in the engine, and the same model in transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hicache.bench.exact.plan import PAGE, Plan
from hicache.builder import ModelDescription, describe_model
from hicache.engine.model import CausalModel
from hicache.testing.families import VOCABULARY, build_tiny, tiny_config


class Plain:
    """The model as transformers runs it, without any cache."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of every token, computed at once: float32 [tokens, vocabulary]."""
        logits: torch.Tensor = self._module(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits.float()

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """The greedy answer, each token from a forward over all that is before it."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def agreed(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """How many tokens of `answer` from its first on are those that the model would choose greedily."""
        chosen = self.logits([*prompt, *answer])[len(prompt) - 1 : -1].argmax(-1).tolist()
        return next((place for place, token in enumerate(answer) if token != chosen[place]), len(answer))


@dataclass(frozen=True, slots=True)
class Subject:
    """One family and how much of it is tried."""

    family: str
    plan: Plan
    description: ModelDescription
    model: CausalModel
    plain: Plain

    @classmethod
    def of(cls, family: str, plan: Plan) -> "Subject":
        """The tiny model of a family, in float32."""
        description = describe_model(tiny_config(family), PAGE, "float32")
        return cls(family, plan, description, CausalModel(build_tiny(family)), Plain(build_tiny(family)))


def random_tokens(count: int, seed: int) -> list[int]:
    """Tokens of any kind but those that end an answer."""
    tokens: list[int] = np.random.default_rng(seed).integers(3, VOCABULARY - 1, count).tolist()
    return tokens
