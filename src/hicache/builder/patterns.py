"""Which type each layer of a model is: what the config lists, else what transformers makes of its other fields."""

from collections.abc import Callable, Collection
from typing import TypeAlias

from hicache.builder.fields import Fields

LayerTypes: TypeAlias = tuple[str, ...]
Pattern: TypeAlias = Callable[[Fields], LayerTypes]

FULL, SLIDING, CHUNK, INDEXED = "full_attention", "sliding_attention", "chunked_attention", "indexed_attention"
LINEAR, CONV, HYBRID = "linear_attention", "conv", "hybrid"

_OLD_NAMES = {"attention": FULL, "mamba": LINEAR, "deepseek_sparse_attention": INDEXED}
_BLOCKS = {"M": LINEAR, "*": FULL, "E": "moe", "-": "mlp"}
_ZAMBA2 = (
    *((LINEAR,) * 6 + (HYBRID,)),
    *((LINEAR,) * 5 + (HYBRID,)) * 6,
    *((LINEAR,) * 4 + (HYBRID,)),
    *((LINEAR,) * 3 + (HYBRID,)),
    *(LINEAR,) * 2,
)


def declared(fields: Fields) -> LayerTypes | None:
    """The list in the config, in today's names; None where there is none."""
    names = fields.names("layer_types") or fields.names("layers_block_type")
    return None if names is None else tuple(_OLD_NAMES.get(name, name) for name in names)


def listed(otherwise: Pattern) -> Pattern:
    """The list in the config, or `otherwise`."""

    def pattern(fields: Fields) -> LayerTypes:
        return declared(fields) or otherwise(fields)

    return pattern


def always(layer_type: str) -> Pattern:
    """Every layer alike, whatever else the config lists."""

    def pattern(fields: Fields) -> LayerTypes:
        return _only(fields, (layer_type,) * fields.layers)

    return pattern


def windowed(fields: Fields) -> LayerTypes:
    """Every layer has the window where the config gives one, and full attention where it doesn't."""
    layer_type = FULL if fields.get("sliding_window") is None else SLIDING
    return _only(fields, (layer_type,) * fields.layers)


def every(period: str, at: str, between: str) -> Pattern:
    """Each n-th layer is `at`, the others `between`; n is the field `period`."""

    def pattern(fields: Fields) -> LayerTypes:
        n = fields.count(period)
        return _choose(fields, at, between, [layer for layer in range(fields.layers) if (layer + 1) % n == 0])

    return listed(pattern)


def late_windows(fields: Fields) -> LayerTypes:
    """Full attention up to `max_window_layers`, windows from there on, where the config gives a window."""
    if fields.get("sliding_window") is None:
        return (FULL,) * fields.layers
    return _choose(fields, FULL, SLIDING, range(fields.count("max_window_layers")))


def llama4(fields: Fields) -> LayerTypes:
    """Chunks where keys are turned, full attention where they aren't."""
    if fields.get("attention_chunk_size") is None:
        return (FULL,) * fields.layers
    return _choose(fields, CHUNK, FULL, _turned(fields))


def smollm3(fields: Fields) -> LayerTypes:
    """Full attention where keys are turned, windows (if the config gives one) where they aren't."""
    if fields.get("sliding_window") is None:
        return (FULL,) * fields.layers
    return _choose(fields, FULL, SLIDING, _turned(fields))


def bamba(fields: Fields) -> LayerTypes:
    """Attention at `attn_layer_indices`, Mamba-2 elsewhere."""
    return _only(fields, _choose(fields, FULL, LINEAR, fields.get("attn_layer_indices") or ()))


def lfm2(fields: Fields) -> LayerTypes:
    """Attention at `full_attn_idxs` (everywhere without it), short convolutions elsewhere."""
    attention = fields.get("full_attn_idxs")
    return _choose(fields, FULL, CONV, range(fields.layers) if attention is None else attention)


def kimi(fields: Fields) -> LayerTypes:
    """Attention where `linear_attn_config` counts it from 1, or at each fourth layer after the first."""
    nested = fields.get("linear_attn_config") or {}
    if "full_attn_layers" in nested and "kda_layers" in nested:
        return _choose(fields, FULL, LINEAR, [layer - 1 for layer in nested["full_attn_layers"]])
    return _choose(fields, FULL, LINEAR, range(4, fields.layers, 4))


def olmo_hybrid(fields: Fields) -> LayerTypes:
    """Attention at each fourth layer, and at the last where there are fewer than four."""
    return _choose(fields, FULL, LINEAR, range(3, fields.layers, 4) or [fields.layers - 1])


def gemma4(fields: Fields) -> LayerTypes:
    """Windows between each sixth layer, if no list is given; the last layer is always full attention."""
    types = declared(fields) or _choose(fields, FULL, SLIDING, range(5, fields.layers, 6))
    return (*types[:-1], FULL)


def nemotron_h(fields: Fields) -> LayerTypes:
    """`hybrid_override_pattern`, a letter per layer, or four layers, one of each type."""
    letters = fields.get("hybrid_override_pattern")
    if letters is None:
        return (LINEAR, "moe", FULL, "mlp")
    return tuple(_BLOCKS.get(letter, letter) for letter in str(letters))


def zamba2(_fields: Fields) -> LayerTypes:
    """The layers of the published model of 54 layers."""
    return _ZAMBA2


def _turned(fields: Fields) -> list[int]:
    """Layers that turn their keys: 1 in `no_rope_layers`, or all but each `no_rope_layer_interval`-th."""
    n = fields.count("no_rope_layer_interval")
    flags = fields.get("no_rope_layers") or [(layer + 1) % n for layer in range(fields.layers)]
    return [layer for layer, flag in enumerate(flags) if flag]


def _choose(fields: Fields, chosen: str, other: str, layers: Collection[int]) -> LayerTypes:
    return tuple(chosen if layer in layers else other for layer in range(fields.layers))


def _only(fields: Fields, types: LayerTypes) -> LayerTypes:
    """`types`, which the model runs whatever the config lists: a list that says otherwise is refused."""
    names = declared(fields) or types
    if names != types:
        given, run = (", ".join(sorted(set(each))) for each in (names, types))
        raise fields.refused(f"layers of type {given} in its list, but its other fields make it run {run}")
    return types
