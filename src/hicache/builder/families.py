"""Every family that is kept, one declaration each: which layers it has, what each keeps, what an absent field means."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from hicache.builder import patterns
from hicache.builder.fields import Fields
from hicache.builder.kinds import (
    ATTENTION,
    CHUNKED,
    GATED_DELTA,
    INDEXER,
    KIMI_DELTA,
    LATENT,
    SHORT_CONV,
    WINDOW,
    Kind,
    mamba2,
)
from hicache.builder.patterns import CHUNK, CONV, FULL, HYBRID, INDEXED, LINEAR, SLIDING, LayerTypes, Pattern

Keeps: TypeAlias = Mapping[str, tuple[Kind, ...]]


def _nothing(_fields: Fields) -> Mapping[str, Any]:
    return {}


def _nowhere(_fields: Fields, _types: LayerTypes) -> Mapping[int, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """A model type of transformers.

    `keeps`: what a layer of each type keeps. `defaults`: what transformers takes for a field that is absent.
    `fill`: fields that it computes from others. `overrides`: fields that differ at some layers. `reads`: layers that
    own nothing, with the layer whose state each reads.
    """

    keeps: Keeps
    defaults: Mapping[str, Any]
    layer_types: Pattern
    fill: Callable[[Fields], Mapping[str, Any]] = _nothing
    overrides: Callable[[Fields, LayerTypes], Mapping[int, Mapping[str, Any]]] = _nowhere
    reads: Callable[[Fields, LayerTypes], Mapping[int, int]] = _nowhere


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int | None, head_dim: int | None = None) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _window_switch(fields: Fields) -> Mapping[str, Any]:
    """A window counts only where it is switched on."""
    return {} if fields.get("use_sliding_window") else {"sliding_window": None}


def _rounded_head_dim(fields: Fields) -> Mapping[str, Any]:
    """The size of a head, where none is given, is rounded down."""
    if fields.get("head_dim") is not None:
        return {}
    return {"head_dim": fields.count("hidden_size") // fields.count("num_attention_heads")}


def _mamba_head_dim(fields: Fields) -> Mapping[str, Any]:
    """`mamba_d_head` may be "auto": the inner size shared by the heads."""
    if fields.get("mamba_d_head") != "auto":
        return {}
    heads = fields.count("mamba_n_heads")
    inner = fields.count_or("mamba_d_ssm", fields.count("mamba_expand") * fields.count("hidden_size"))
    return {"mamba_d_head": fields.divide(inner, "the inner size", heads, "Mamba heads", "give mamba_d_head")}


def _zamba2(fields: Fields) -> Mapping[str, Any]:
    """Attention sees hidden state and embedding side by side: heads are twice as wide."""
    hidden, heads, mamba_heads = (
        fields.count(name) for name in ("hidden_size", "num_attention_heads", "n_mamba_heads")
    )
    inner = fields.count("mamba_expand") * hidden
    return {
        "head_dim": fields.divide(2 * hidden, "twice the hidden_size", heads, "heads", "change num_attention_heads"),
        "mamba_headdim": fields.divide(inner, "the inner size", mamba_heads, "Mamba heads", "change n_mamba_heads"),
    }


def _kimi(fields: Fields) -> Mapping[str, Any]:
    """Published checkpoints nest the sizes of linear attention."""
    names = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    nested = fields.get("linear_attn_config") or {}
    return {name: nested[old] for old, name in names.items() if old in nested}


def _olmo_hybrid(fields: Fields) -> Mapping[str, Any]:
    heads = fields.count("num_attention_heads")
    key_heads = fields.count_or("linear_num_key_heads", heads)
    key_dim = fields.count_or("linear_key_head_dim", 3 * fields.count("hidden_size") // (4 * key_heads))
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": fields.count_or("linear_num_value_heads", heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": fields.count_or("linear_value_head_dim", 2 * key_dim),
    }


def _nemotron_h(fields: Fields) -> Mapping[str, Any]:
    """Older names of two sizes; the list of layers says how many there are."""
    names = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel"}
    renamed = {name: fields.get(old) for old, name in names.items() if fields.get(old) is not None}
    types = patterns.declared(fields) or patterns.nemotron_h(fields)
    return {**renamed, "num_hidden_layers": len(types)}


def _glm_moe_dsa(fields: Fields) -> Mapping[str, Any]:
    """Which layers pick tokens by keys of their own: a list, a pattern of letters, or each n-th from an offset on."""
    if fields.get("indexer_types") is not None:
        return {}
    letters = fields.get("index_topk_pattern")
    if letters is not None:
        return {"indexer_types": [{"F": "full", "S": "shared"}.get(letter, letter) for letter in letters]}
    n, offset = max(fields.get("index_topk_freq"), 1), fields.get("index_skip_topk_offset")
    return {"indexer_types": ["shared" if max(layer - offset + 1, 0) % n else "full" for layer in range(fields.layers)]}


def _gemma4_overrides(fields: Fields, types: LayerTypes) -> Mapping[int, Mapping[str, Any]]:
    """Heads of full-attention layers have a size and a number of their own."""
    given = fields.get("per_layer_config")
    if given is None:
        wide = {"head_dim": fields.get("global_head_dim")}
        if fields.get("attention_k_eq_v") and fields.get("num_global_key_value_heads") is not None:
            wide["num_key_value_heads"] = fields.get("num_global_key_value_heads")
        return {layer: wide for layer, layer_type in enumerate(types) if layer_type == FULL}
    for layer, changes in given.items():
        if not str(layer).isdigit() or set(changes) - {"head_dim", "num_key_value_heads"}:
            raise fields.refused(f"per_layer_config={given!r}; only head sizes and KV heads may differ by layer")
    return {int(layer): changes for layer, changes in given.items()}


def _gemma4_reads(fields: Fields, types: LayerTypes) -> Mapping[int, int]:
    """The last `num_kv_shared_layers` layers read the last layer of their type before them."""
    shared = fields.get("num_kv_shared_layers") or 0
    owners = {layer_type: layer for layer, layer_type in enumerate(types[: len(types) - shared])}
    if set(types) - set(owners):
        raise fields.refused(f"num_kv_shared_layers={shared}: no layer before these has what they share")
    return {layer: owners[types[layer]] for layer in range(len(types) - shared, len(types))}


_DENSE: Keeps = {FULL: (ATTENTION,)}
_WINDOWS: Keeps = {FULL: (ATTENTION,), SLIDING: (WINDOW,)}
_LATENT: Keeps = {FULL: (LATENT,)}
_INDEXED: Keeps = {INDEXED: (LATENT, INDEXER)}
_DELTA: Keeps = {FULL: (ATTENTION,), LINEAR: (GATED_DELTA,)}
_MAMBA2 = mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_MAMBA2_ZAMBA2 = mamba2("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv")
_MAMBA2_NEMOTRON = mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
_MAMBA2_PURE = mamba2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")

_SWITCHED = {"sliding_window": 4096, "use_sliding_window": False}
_LATE = {**_SWITCHED, "max_window_layers": 28}
_NO_ROPE = {"no_rope_layers": None, "no_rope_layer_interval": 4}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_DSA = {**_MLA, "index_head_dim": 128, "index_topk": 2048}
_DELTA_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_MAMBA2_SIZES = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(_DENSE, _sizes(32, 4096, 32, None), patterns.always(FULL)),
        "qwen2": Family(
            _WINDOWS, _sizes(32, 4096, 32, 32) | _LATE, patterns.listed(patterns.late_windows), _window_switch
        ),
        "qwen3": Family(
            _WINDOWS, _sizes(32, 4096, 32, 32, 128) | _LATE, patterns.listed(patterns.late_windows), _window_switch
        ),
        "qwen3_moe": Family(_WINDOWS, _sizes(24, 2048, 32, 4) | _SWITCHED, patterns.windowed, _window_switch),
        "mistral": Family(_WINDOWS, _sizes(32, 4096, 32, 8) | {"sliding_window": 4096}, patterns.windowed),
        "mixtral": Family(_WINDOWS, _sizes(32, 4096, 32, 8) | {"sliding_window": None}, patterns.windowed),
        "olmo2": Family(_DENSE, _sizes(32, 4096, 32, None), patterns.always(FULL)),
        "granite": Family(_DENSE, _sizes(32, 4096, 32, None), patterns.always(FULL)),
        "starcoder2": Family(_WINDOWS, _sizes(30, 3072, 24, 2) | {"sliding_window": None}, patterns.windowed),
        "smollm3": Family(
            _WINDOWS,
            _sizes(36, 2048, 16, 4) | _NO_ROPE | {"sliding_window": None, "use_sliding_window": False},
            patterns.listed(patterns.smollm3),
            _window_switch,
        ),
        "gemma2": Family(
            _WINDOWS,
            _sizes(26, 2304, 8, 4, 256)
            | {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "full_attention_interval": 2},
            patterns.every("full_attention_interval", FULL, SLIDING),
        ),
        "gemma3_text": Family(
            _WINDOWS,
            _sizes(26, 2304, 8, 4, 256) | {"sliding_window": 4096, "sliding_window_pattern": 6},
            patterns.every("sliding_window_pattern", FULL, SLIDING),
        ),
        "gemma4_text": Family(
            _WINDOWS,
            _sizes(30, 2304, 8, 4, 256) | {"sliding_window": 512, "global_head_dim": 512, "per_layer_config": None},
            patterns.gemma4,
            overrides=_gemma4_overrides,
            reads=_gemma4_reads,
        ),
        "gpt_oss": Family(
            _WINDOWS,
            _sizes(36, 2880, 64, 8, 64) | {"sliding_window": 128, "full_attention_interval": 2},
            patterns.every("full_attention_interval", FULL, SLIDING),
        ),
        "llama4_text": Family(
            {FULL: (ATTENTION,), CHUNK: (CHUNKED,)},
            _sizes(48, 5120, 40, 8, 128) | _NO_ROPE | {"attention_chunk_size": 8192},
            patterns.listed(patterns.llama4),
        ),
        "deepseek_v2": Family(_LATENT, {"num_hidden_layers": 32} | _MLA, patterns.always(FULL)),
        "deepseek_v3": Family(_LATENT, {"num_hidden_layers": 61} | _MLA, patterns.always(FULL)),
        "glm4_moe": Family(_DENSE, _sizes(46, 4096, 96, 8), patterns.always(FULL), _rounded_head_dim),
        "deepseek_v32": Family(_INDEXED, {"num_hidden_layers": 61} | _DSA, patterns.always(INDEXED)),
        "glm_moe_dsa": Family(
            _INDEXED,
            {"num_hidden_layers": 78, "index_topk_freq": 1, "index_skip_topk_offset": 2} | _DSA,
            patterns.always(INDEXED),
            _glm_moe_dsa,
        ),
        "qwen3_next": Family(
            _DELTA,
            _sizes(48, 2048, 16, 2, 256) | _DELTA_SIZES,
            patterns.every("full_attention_interval", FULL, LINEAR),
        ),
        "qwen3_5_text": Family(
            _DELTA,
            _sizes(32, 4096, 16, 4, 256) | _DELTA_SIZES,
            patterns.every("full_attention_interval", FULL, LINEAR),
        ),
        "kimi_linear": Family(
            {FULL: (LATENT,), LINEAR: (KIMI_DELTA,)},
            {"num_hidden_layers": 27, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
            | _MLA,
            patterns.listed(patterns.kimi),
            _kimi,
        ),
        "falcon_h1": Family(
            {HYBRID: (ATTENTION, _MAMBA2)},
            _sizes(32, 4096, 32, 8) | _MAMBA2_SIZES | {"mamba_d_ssm": 1024},
            patterns.always(HYBRID),
            _mamba_head_dim,
        ),
        "bamba": Family(
            {FULL: (ATTENTION,), LINEAR: (_MAMBA2,)},
            _sizes(32, 4096, 32, 8) | _MAMBA2_SIZES,
            patterns.bamba,
            _mamba_head_dim,
        ),
        "granitemoehybrid": Family(
            {FULL: (ATTENTION,), LINEAR: (_MAMBA2,)},
            _sizes(32, 4096, 32, None) | _MAMBA2_SIZES,
            patterns.listed(patterns.always(LINEAR)),
            _mamba_head_dim,
        ),
        "nemotron_h": Family(
            {FULL: (ATTENTION,), LINEAR: (_MAMBA2_NEMOTRON,), "moe": (), "mlp": ()},
            {
                **_sizes(4, 4096, 32, 8, 128),
                "mamba_num_heads": 128,
                "mamba_head_dim": 64,
                "n_groups": 8,
                "ssm_state_size": 128,
                "conv_kernel": 4,
            },
            patterns.listed(patterns.nemotron_h),
            _nemotron_h,
        ),
        "zamba2": Family(
            {HYBRID: (ATTENTION, _MAMBA2_ZAMBA2), LINEAR: (_MAMBA2_ZAMBA2,)},
            {
                **_sizes(54, 2560, 32, None),
                "n_mamba_heads": 8,
                "mamba_ngroups": 1,
                "mamba_d_state": 64,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
            },
            patterns.listed(patterns.zamba2),
            _zamba2,
        ),
        "mamba2": Family(
            {LINEAR: (_MAMBA2_PURE,)},
            {
                "num_hidden_layers": 64,
                "num_heads": 128,
                "head_dim": 64,
                "n_groups": 8,
                "state_size": 128,
                "conv_kernel": 4,
            },
            patterns.always(LINEAR),
        ),
        "lfm2": Family(
            {FULL: (ATTENTION,), CONV: (SHORT_CONV,)},
            _sizes(32, 2560, 32, 8) | {"conv_L_cache": 3},
            patterns.listed(patterns.lfm2),
        ),
        "olmo_hybrid": Family(
            _DELTA,
            _sizes(32, 3840, 30, None) | {"linear_conv_kernel_dim": 4, "linear_num_key_heads": None},
            patterns.listed(patterns.olmo_hybrid),
            _olmo_hybrid,
        ),
    }
)
"""Model types of transformers that are kept, and how."""
