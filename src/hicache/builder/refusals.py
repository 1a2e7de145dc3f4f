"""What can't be kept right is refused before anything is described: the error names the model and the reason."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hicache.builder.families import FAMILIES
from hicache.errors import ConfigError

_MAMBA1 = "is Mamba-1: transformers ignores its saved state when a chunk has several tokens"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "mamba": _MAMBA1,
        "falcon_mamba": _MAMBA1,
        "jamba": _MAMBA1,
        "zamba": _MAMBA1,
        "deepseek_v4": "has cache layers of its own in transformers, which also keep compressed blocks",
        "minimax": "has a cache class of its own in transformers and takes no other",
    }
)
"""Model types that are known and can't be kept, and why."""

_FOREIGN = {
    "kv_lora_rank": "latent attention (MLA)",
    "attention_chunk_size": "chunked attention",
    "index_topk": "an indexer",
    "linear_num_key_heads": "linear attention state",
    "mamba_d_state": "Mamba state",
    "state_size": "Mamba state",
    "conv_L_cache": "short convolution state",
    "sliding_window": "a sliding window",
    "per_layer_config": "layers that differ",
    "attn_logit_softcapping": "soft-capped attention scores",
}
_NEVER = {
    "quantization_config": "has quantised weights, which are not run",
    "is_encoder_decoder": "is an encoder and a decoder; a decoder alone is needed",
    "add_cross_attention": "attends to an encoder; a decoder alone is needed",
}


def refuse(values: Mapping[str, Any]) -> None:
    """Raises ConfigError unless `values` are of a model type and a form that is kept."""
    model = values.get("model_type", "(no model_type)")
    _refuse_wrapper(values, model)
    for field, reason in _NEVER.items():
        if values.get(field):
            raise ConfigError(f"model type {model!r} with {field}={values[field]!r} {reason}")
    if model in REFUSED:
        raise ConfigError(f"model type {model!r} {REFUSED[model]}")
    if model not in FAMILIES:
        raise ConfigError(f"model type {model!r} is not supported; these are: {', '.join(FAMILIES)}")
    _refuse_foreign(values, model)
    _refuse_both_ways(values, model)


def _refuse_wrapper(values: Mapping[str, Any], model: Any) -> None:
    text = values.get("text_config")
    if text:
        kind = text.get("model_type") if isinstance(text, Mapping) else None
        inside = f"model type {kind!r}" if kind else "the model in its text_config"
        raise ConfigError(f"model type {model!r} has more inputs than text; {inside} alone can be run: save that part")


def _refuse_foreign(values: Mapping[str, Any], model: str) -> None:
    for field, state in _FOREIGN.items():
        if values.get(field) and field not in FAMILIES[model].defaults:
            raise ConfigError(
                f"model type {model!r} with {field}={values[field]!r} has {state}, which this model type has not"
            )


def _refuse_both_ways(values: Mapping[str, Any], model: str) -> None:
    """Where a token sees later ones, a prefix's state depends on what follows it."""
    if values.get("use_bidirectional_attention") in (True, "all"):
        raise ConfigError(
            f"model type {model!r} with use_bidirectional_attention sees later tokens, so that no prefix can be kept"
        )
