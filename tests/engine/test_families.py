"""Every model family that is not refused gives the tokens that transformers itself gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.tiny import ask, prompt, running, settings, write_checkpoint

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "olmo2": {},
    "smollm3": {},
    "mistral": {"sliding_window": None},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "starcoder2": {"sliding_window": None},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(model_type: str, tmp_path: Path, cache_folder: Path):
    folder = write_checkpoint(tmp_path / "model", model_type, **FAMILIES[model_type])
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = prompt(75)
    with torch.inference_mode():
        expected = reference.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    with running(settings(folder, cache_folder, chunk_tokens=32)) as engine:
        cold, _ = ask(engine, ids, 12)
        warm, last = ask(engine, ids, 12)
    assert cold == expected
    assert warm == expected
    assert last.usage is not None and last.usage.cached_tokens["device"] == 72
