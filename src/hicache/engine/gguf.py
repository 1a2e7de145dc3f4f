"""A llama GGUF file becomes a transformers checkpoint: config, bfloat16 safetensors, tokenizer with chat template."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from hicache.errors import ConfigError

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3


def convert_gguf(source: Path, target: Path, progress: Callable[[int, int], None]) -> None:
    """Writes the checkpoint of `source` into the existing folder `target`; `progress(done, total)` counts tensors.

    ConfigError when the file's architecture or tokenizer is not the llama / byte-level BPE kind.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.model"] != "gpt2":
        raise ConfigError(
            f"{source.name} holds architecture {fields['general.architecture']!r} with tokenizer "
            f"{fields['tokenizer.ggml.model']!r}; only 'llama' with 'gpt2' (byte-level BPE) can be converted"
        )
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    weights: dict[str, torch.Tensor] = {}
    for done, (name, values) in enumerate(_weights(reader, config)):
        weights[name] = torch.from_numpy(np.array(values)).to(torch.bfloat16).contiguous()
        progress(done + 1, len(reader.tensors))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    _write_tokenizer(fields, target)


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(np.float32(fields["llama.attention.layer_norm_rms_epsilon"])),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _weights(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        stem = tensor.name.removesuffix(".weight")
        if not stem.startswith("blk."):
            yield f"{_TOP_LEVEL[stem]}.weight", values
            continue
        _, layer, kind = stem.split(".")
        if kind == "attn_q":
            values = _rotary_halves(values, config["num_attention_heads"])
        elif kind == "attn_k":
            values = _rotary_halves(values, config["num_key_value_heads"])
        yield f"model.layers.{layer}.{_IN_LAYER[kind]}.weight", values


def _rotary_halves(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """GGUF interleaves the two rotary halves of a head's rows; transformers keeps one after the other."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if fields["tokenizer.ggml.pre"] == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
