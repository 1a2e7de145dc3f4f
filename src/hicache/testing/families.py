"""A tiny random model of every family that is kept: built in a fraction of a second, the same for the same seed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

VOCABULARY = 256
END = VOCABULARY - 1
WINDOW = 10
"""Tokens of every window and chunk: no multiple of a page of 4, and crossed by any prompt worth the name."""

_BYTE_NEVER_IN_TEXT = "\u00ff"
_TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\\n' }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """A model type of transformers, the fields of a config that make it tiny, and how much wider its weights are drawn.

    `widened`: wide enough that the next token depends on what stands far before it, and narrow enough that rounding
    does not grow over the layers. `query_norm`: what the weights of query norms are multiplied by, for the family that
    does not divide its scores by the root of the head size.
    """

    model_type: str
    fields: Mapping[str, Any]
    widened: float
    query_norm: float


_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 32768,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": END,
    "tie_word_embeddings": False,
}
_HEADS = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_EXPERT_GROUPS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_DEEPSEEK = {**_MLA, **_EXPERT_GROUPS}
# A layer scores a token 0 when no indexer head answers; with few heads, many tokens tie, and which of them are picked
# depends on how many there are. With 32 heads there are no ties.
_INDEXER = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 6}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_THREE_TO_ONE = [_LINEAR, _LINEAR, _LINEAR, _FULL]


_QUERY_NORM = {"gemma4_text": 0.25}
_WIDENED = {
    **dict.fromkeys(("qwen3_moe", "starcoder2"), 8.0),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear"), 2.0),
    **dict.fromkeys(("bamba", "granitemoehybrid", "nemotron_h", "zamba2", "mamba2"), 2.0),
}


def _tiny(model_type: str, *parts: Mapping[str, Any], **fields: Any) -> TinyFamily:
    merged = dict(_COMMON)
    for part in (*parts, fields):
        merged.update(part)
    return TinyFamily(
        model_type, MappingProxyType(merged), _WIDENED.get(model_type, 6.0), _QUERY_NORM.get(model_type, 1.0)
    )


_ALL = (
    _tiny("llama", _HEADS),
    _tiny("qwen2", _HEADS, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    _tiny("qwen3", _HEADS),
    _tiny("qwen3_moe", _HEADS, _EXPERTS),
    _tiny("mistral", _HEADS, sliding_window=WINDOW),
    _tiny("mixtral", _HEADS, num_local_experts=4, num_experts_per_tok=2),
    _tiny("olmo2", _HEADS),
    _tiny("granite", _HEADS),
    _tiny("starcoder2", _HEADS, sliding_window=WINDOW),
    _tiny("smollm3", _HEADS),
    _tiny(
        "gemma2",
        _HEADS,
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _FULL] * 2,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=None,
    ),
    _tiny("gemma3_text", _HEADS, sliding_window=WINDOW, layer_types=[_SLIDING, _SLIDING, _SLIDING, _FULL]),
    _tiny(
        "gemma4_text",
        _HEADS,
        num_hidden_layers=6,
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        layer_types=[_SLIDING, _FULL] * 3,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        global_head_dim=32,
    ),
    _tiny(
        "gpt_oss",
        _HEADS,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=[_SLIDING, _FULL] * 2,
    ),
    _tiny(
        "llama4_text",
        _HEADS,
        attention_chunk_size=WINDOW,
        num_local_experts=2,
        intermediate_size_mlp=64,
        num_experts_per_tok=1,
        no_rope_layers=[1, 1, 1, 0],
    ),
    _tiny("deepseek_v2", _DEEPSEEK, topk_method="greedy"),
    _tiny("deepseek_v3", _DEEPSEEK),
    _tiny("glm4_moe", _HEADS, _EXPERT_GROUPS),
    _tiny("deepseek_v32", _DEEPSEEK, _INDEXER),
    _tiny("glm_moe_dsa", _DEEPSEEK, _INDEXER, indexer_types=["full", "shared", "full", "shared"]),
    _tiny("qwen3_next", _HEADS, _EXPERTS, _DELTA, shared_expert_intermediate_size=32, layer_types=_THREE_TO_ONE),
    _tiny("qwen3_5_text", _HEADS, _DELTA, layer_types=_THREE_TO_ONE),
    _tiny(
        "kimi_linear",
        _MLA,
        q_lora_rank=None,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=32,
        num_expert_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        layer_types=_THREE_TO_ONE,
        linear_head_dim=16,
        linear_num_heads=4,
        linear_conv_kernel_dim=4,
    ),
    _tiny("falcon_h1", _HEADS, _MAMBA2, mamba_d_ssm=128),
    _tiny("bamba", _HEADS, _MAMBA2, attn_layer_indices=[1, 3]),
    _tiny(
        "granitemoehybrid",
        _HEADS,
        _MAMBA2,
        layer_types=[_LINEAR, _FULL] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
    ),
    _tiny(
        "nemotron_h",
        _HEADS,
        num_hidden_layers=6,
        layers_block_type=[_LINEAR, _FULL, "mlp", "moe", _LINEAR, _FULL],
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=24,
        conv_kernel=4,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    _tiny(
        "zamba2",
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=4,
        layers_block_type=[_LINEAR, "hybrid"] * 2,
        n_mamba_heads=8,
        mamba_ngroups=1,
        mamba_d_state=24,
        mamba_d_conv=4,
        mamba_expand=2,
        chunk_size=8,
        use_mem_rope=True,
        adapter_rank=8,
    ),
    _tiny("mamba2", num_heads=8, head_dim=16, n_groups=1, state_size=24, conv_kernel=4, expand=2, chunk_size=8),
    _tiny("lfm2", _HEADS, conv_L_cache=3, layer_types=["conv", _FULL] * 2, block_auto_adjust_ff_dim=False),
    _tiny(
        "olmo_hybrid",
        _DELTA,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=_THREE_TO_ONE,
    ),
)

TINY: Mapping[str, TinyFamily] = MappingProxyType({family.model_type: family for family in _ALL})
"""Every family by its model type: 256 tokens, 4 to 6 layers, windows and chunks of 10 tokens."""

_AS_IT_IS: Mapping[str, Any] = MappingProxyType({})


def tiny_config(family: str, changes: Mapping[str, Any] = _AS_IT_IS) -> Any:
    """The config (of transformers) of the tiny model of `family`, some fields of it changed."""
    from transformers import AutoConfig

    return AutoConfig.for_model(TINY[family].model_type, **{**TINY[family].fields, **changes})


def build_tiny(family: str, dtype: str = "float32", seed: int = 0, changes: Mapping[str, Any] = _AS_IT_IS) -> Any:
    """A tiny random model of `family` (of transformers, in evaluation mode) with parameters of `dtype`.

    Equal arguments give equal weights; torch's own random state is left as it was. Weights are drawn wider than
    transformers draws them, so that the next token depends on the context. `changes` are fields of the config, for a
    model that is less tiny.
    """
    import torch
    from transformers import AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(seed)
        model = classes.from_config(tiny_config(family, changes))
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in name:
                parameter.mul_(TINY[family].widened)
            elif name.endswith("q_norm.weight"):
                parameter.mul_(TINY[family].query_norm)
    return model.to(getattr(torch, dtype)).eval()


def write_tiny(
    family: str, folder: Path, dtype: str = "float32", seed: int = 0, changes: Mapping[str, Any] = _AS_IT_IS
) -> Path:
    """Writes the model that `build_tiny` gives, with a byte-level tokenizer, as a checkpoint into `folder`."""
    build_tiny(family, dtype, seed, changes).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, end: int = END) -> None:
    """Writes a tokenizer into `folder`: a token per byte, and `<end>` with id `end`.

    `end` is 256, or 255 for a vocabulary of 256: then `<end>` takes the place of byte 0xFF, which no text has.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if end == END:
        alphabet.remove(_BYTE_NEVER_IN_TEXT)
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    specials = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<end>")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE, **specials}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
