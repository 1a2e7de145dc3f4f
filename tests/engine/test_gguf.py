"""A converted GGUF computes what the checkpoint it was made from computes, and its tokenizer round-trips."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from hicache.engine.checkpoint import open_checkpoint
from hicache.engine.gguf import convert_gguf
from hicache.engine.model import load_model, load_tokenizer
from hicache.errors import ConfigError
from tests.engine.tiny import prompt, write_checkpoint

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp orders the rows of a rotary projection."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, model: Any, architecture: str = "llama") -> None:
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*CONTROL, *alphabet, "Ġt", *(f"<unused{index}>" for index in range(300 - 260))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.state_dict().items():
        stem = name.removesuffix(".weight")
        values = weight.float().numpy()
        if stem.startswith("model.layers."):
            layer, kind = stem.removeprefix("model.layers.").split(".", 1)
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(NAMES[kind])
            values = interleaved(values, heads) if heads else values
            writer.add_tensor(f"blk.{layer}.{NAMES[kind]}.weight", values)
        else:
            writer.add_tensor(f"{NAMES[stem]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_checkpoint(tmp_path_factory.mktemp("gguf") / "original", head_dim=16, num_attention_heads=4)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def converted(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    write_gguf(folder / "model.gguf", original)
    seen: list[tuple[int, int]] = []
    convert_gguf(folder / "model.gguf", folder, lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]
    return folder


def test_the_weights_are_the_same(original, converted):
    loaded: Any = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    ids = torch.tensor([prompt(50)])
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, original.float()(ids).logits)


def test_the_engine_takes_it(converted):
    known = open_checkpoint(converted, "float32", 8)
    assert known.end_of_text == frozenset([2])
    assert known.max_positions == 2048
    assert load_model(converted, torch.float32).nbytes == known.weights_bytes


@pytest.mark.parametrize("text", ["Hello  world\n\t 1234 don't", "naïve 你好 🙂 " + CONTROL[1] + "user", " to tea"])
def test_the_tokenizer_round_trips(converted, text):
    tokenizer = load_tokenizer(converted)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens_merges_and_template(converted):
    tokenizer = load_tokenizer(converted)
    assert tokenizer.encode(CONTROL[2] + " t", add_special_tokens=False) == [2, 259]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""
    assert tokenizer.eos_token_id == 2
    turns = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"


def test_another_architecture_is_refused(original, tmp_path):
    write_gguf(tmp_path / "model.gguf", original, architecture="gemma")
    with pytest.raises(ConfigError, match=r"gemma.*only 'llama'"):
        convert_gguf(tmp_path / "model.gguf", tmp_path, lambda done, total: None)
