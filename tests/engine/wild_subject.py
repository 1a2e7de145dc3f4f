"""A model in the engine and the same one in transformers, which says what every answer must be."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hicache.builder import ModelDescription, describe_model
from hicache.engine.checkpoint import open_checkpoint
from hicache.engine.drafts import DraftPlan, DraftSettings, FirstLayers, plan_draft
from hicache.engine.model import CausalModel, load_model
from hicache.engine.segment import TokenArray
from hicache.errors import ConfigError
from hicache.testing.families import build_tiny, tiny_config
from tests.engine.drafters import Oracle
from tests.engine.mtp_checkpoint import write_mtp

TOKENS = 250


class Subject:
    """A model in the engine, and the same in transformers."""

    def __init__(self, family: str, folder: Path | None = None) -> None:
        classes: Any = AutoModelForCausalLM
        self.family = family
        self.folder = folder
        self.model = CausalModel(build_tiny(family)) if folder is None else load_model(folder, torch.float32)
        self._plain = build_tiny(family) if folder is None else classes.from_pretrained(folder).eval()
        self._next: dict[tuple[int, ...], int] = {}
        self._described: dict[int, ModelDescription] = {}

    def description(self, page_size: int) -> ModelDescription:
        if page_size not in self._described:
            config = tiny_config(self.family) if self.folder is None else self._plain.config
            self._described[page_size] = describe_model(config, page_size, "float32")
        return self._described[page_size]

    def draft(self, page_size: int, most: int, layers: int) -> DraftPlan | None:
        """A drafter that keeps state: MTP layers if there are any, else the first layers; None if it has no place."""
        if self.folder is not None:
            asked = DraftSettings("mtp", most, "float32", page_size, self.folder)
            return plan_draft(asked, open_checkpoint(self.folder, "float32", page_size))
        description = self.description(page_size)
        plan = FirstLayers(description, description.layer_count if self.family == "gemma4_text" else layers, most)
        try:
            _ = plan.description
        except ConfigError:
            return None
        return plan

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self._plain(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits.float()

    def next(self, tokens: Sequence[int]) -> int:
        key = tuple(tokens)
        if key not in self._next:
            self._next[key] = int(self.logits(tokens)[-1].argmax())
        return self._next[key]

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        known = list(prompt)
        while len(known) < len(prompt) + count:
            known.append(self.next(known))
        return known[len(prompt) :]

    def check(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Each token of the answer is the likeliest after those before, but for what rounding can do."""
        if not answer:
            return
        rows = self.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(answer)[:, None])[:, 0]
        short = (rows.max(1).values - chosen) / rows.abs().max()
        assert float(short.max()) < 1e-4, f"after {len(prompt)} tokens: {answer}, but likeliest {rows.argmax(1)}"


@cache
def subject(family: str) -> Subject:
    return Subject(family)


def mtp_subject(folder: Path, depths: int) -> Subject:
    return Subject("deepseek_v3", write_mtp("deepseek_v3", folder, 2, depths))


class Seer(Oracle):
    """Guesses what the model alone would say, but for every so many tokens."""

    def __init__(self, subject: Subject, source: str, most: int, wrong_every: int) -> None:
        super().__init__([], source, most, lambda position: wrong_every > 0 and position % wrong_every == 0)
        self._subject = subject

    def _guess(self, known: list[int], count: int) -> TokenArray:
        guess: list[int] = []
        for place in range(len(known), len(known) + count):
            token = self._subject.next([*known, *guess])
            guess.append((token + 1) % TOKENS if self._wrong(place) else token)
        return np.array(guess, np.uint32)
