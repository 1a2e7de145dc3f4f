"""Families that are refused, each by name, with what becomes of them in transformers where nobody refuses them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hicache.bench.exact.plan import PAGE, TOLERANCE
from hicache.bench.exact.results import Refusal
from hicache.bench.exact.rig import relative_difference
from hicache.bench.exact.subject import Plain, random_tokens
from hicache.builder import REFUSED, describe_model
from hicache.errors import ConfigError
from hicache.testing.families import VOCABULARY

_TOKENS, _FIRST = 29, 13
_SEED = 7
_LAYERS_OF_TRANSFORMERS = "transformers.cache_utils"
_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4, "pad_token_id": 0}
_HEADS = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mamba": {**_COMMON, "state_size": 16, "conv_kernel": 4, "expand": 2},
        "jamba": {
            **_COMMON,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        "deepseek_v4": {
            **_COMMON,
            **_HEADS,
            "num_key_value_heads": 1,
            "sliding_window": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "q_lora_rank": 24,
            "o_lora_rank": 16,
            "o_groups": 2,
            "index_n_heads": 32,
            "index_head_dim": 16,
            "index_topk": 4,
            "qk_rope_head_dim": 8,
        },
        "minimax": {
            **_COMMON,
            **_HEADS,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "block_size": 8,
        },
    }
)
"""Tiny models of families that are refused."""

REFUSALS = tuple(_CONFIGS)
"""Families that are shown as refused."""


def measure_refusal(family: str) -> Refusal:
    """Passed if the family is refused by name, and if its tiny model in transformers bears the reason out."""
    text = _refusal(family)
    wrong, measured = _measure(family)
    return Refusal(family, wrong and family in text and REFUSED[family] in text, text or "not refused", measured)


def _refusal(family: str) -> str:
    try:
        describe_model({"model_type": family}, PAGE)
    except ConfigError as error:
        return str(error)
    return ""


@torch.inference_mode()
def _measure(family: str) -> tuple[bool, str]:
    """Whether something is in the way of pages, and what: other cache layers, no cache at all, or other logits."""
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    classes: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        module = classes.from_config(AutoConfig.for_model(family, **_CONFIGS[family])).eval()
    layers: Any = DynamicCache(config=module.config).layers
    foreign = {type(layer).__name__ for layer in layers if type(layer).__module__ != _LAYERS_OF_TRANSFORMERS}
    if foreign:
        return True, f"layers of its cache in transformers: {', '.join(sorted(foreign))}"
    tokens = random_tokens(_TOKENS, _SEED)
    try:
        chunked = _in_chunks(module, tokens, [_FIRST, _TOKENS - _FIRST])
    except ValueError as error:
        return True, f"transformers says: {error}"
    expected = Plain(module).logits(tokens)
    apart = relative_difference(chunked, expected)
    single = relative_difference(_in_chunks(module, tokens, [_FIRST] + [1] * (_TOKENS - _FIRST)), expected)
    return apart > TOLERANCE, (
        f"transformers alone, {_TOKENS} tokens in chunks of {_FIRST} and {_TOKENS - _FIRST}: logits differ by"
        f" {apart:.1e} of the largest from those computed at once (token by token: {single:.1e})"
    )


def _in_chunks(module: Any, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """Logits of a prompt, with the cache of transformers between its chunks."""
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=module.config)
    logits = []
    start = 0
    for count in chunks:
        ids = torch.tensor([tokens[start : start + count]])
        logits.append(module(ids, cache=cache, use_cache=True).logits[0].float())
        start += count
    return torch.cat(logits)
