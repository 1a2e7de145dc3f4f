"""Tiny checkpoints with MTP layers whose guesses are sometimes right, and what transformers makes of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from hicache.testing.families import TINY, write_tokenizer


def write_mtp(family: str, folder: Path, layers: int, depths: int) -> Path:
    """A model of `layers` layers, and `depths` MTP layers behind them.

    Layers add little to what comes in, so that the next token mostly depends on the last one: the MTP layers, which
    hand that on, then guess it as often as not, and what they see of the tokens before decides the rest.
    """
    fields = {**TINY[family].fields, "num_hidden_layers": layers + depths}
    classes: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(1)
        model = classes.from_config(AutoConfig.for_model(family, **fields))
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.6 if "o_proj" in name or "down_proj" in name else 6.0)
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        size = fields["hidden_size"]
        for layer in range(layers, layers + depths):
            for name in ("enorm", "hnorm", "shared_head.norm"):
                tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(size)
            mixed = torch.cat((torch.eye(size), 0.02 * torch.randn(size, size)), 1)
            tensors[f"model.layers.{layer}.eh_proj.weight"] = mixed
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": depths}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


class Reference:
    """The same checkpoint in transformers, which computes everything anew each time."""

    def __init__(self, folder: Path) -> None:
        classes: Any = AutoModelForCausalLM
        self._main = classes.from_pretrained(folder).eval()
        first, count = self._main.config.num_hidden_layers, self._main.config.num_mtp_layers
        self._main._keys_to_ignore_on_load_unexpected = [rf"layers\.{n}\." for n in range(first, first + count)]
        self._mtp = MtpModel.from_pretrained(self._main).eval()

    @torch.inference_mode()
    def guesses(self, known: Sequence[int]) -> list[int]:
        """A guess per depth of what follows `known`, of which all but the last are computed."""
        ids = torch.tensor([list(known)])
        hidden = self._main(ids[:, :-1], use_cache=False, output_hidden_states=True).hidden_states[-1]
        candidates, _, _ = self._mtp(
            input_ids=ids[:, 1:],
            last_hidden_states=hidden,
            attention_mask=None,
            position_ids=torch.arange(1, len(known))[None],
            mtp_cache=MtpCache(config=self._main.config.get_mtp_config()),
        )
        return [int(token) for token in candidates[0]]

    @torch.inference_mode()
    def answer(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        """What follows `ids`, the likeliest token each time."""
        known = list(ids)
        while len(known) < len(ids) + max_tokens:
            known.append(int(self._main(torch.tensor([known]), use_cache=False).logits[0, -1].argmax()))
        return known[len(ids) :]
