"""What is described for a family is what transformers keeps when the model runs; what can't be kept is refused."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DummyLayer, LinearAttentionCacheLayerMixin
from transformers.masking_utils import chunked_overlay, sliding_window_overlay

from hicache.builder import FAMILIES, REFUSED, ModelDescription, describe_model
from hicache.coverage import Checkpoint, Full, Window
from hicache.errors import ConfigError
from hicache.layout import TensorSpec
from hicache.testing.families import TINY, VOCABULARY, WINDOW, build_tiny, tiny_config, write_tiny

PAGE = 4
TOKENS = 29


def run(family: str, dtype: str) -> DynamicCache:
    """The cache of the tiny model after a prompt of 26 tokens and 3 single ones."""
    model = build_tiny(family, dtype)
    cache = DynamicCache(config=model.config)
    ids = torch.randint(0, VOCABULARY - 1, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        for start, end in [(0, 26), (26, 27), (27, 28), (28, TOKENS)]:
            positions = torch.arange(start, end)[None]
            model(input_ids=ids[:, start:end], position_ids=positions, cache=cache, use_cache=True)
    return cache


def tensors_of(layer: Any, latent: bool) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Pool, name and content (without the batch) of everything that a layer of transformers' cache holds."""
    if isinstance(layer, DummyLayer):
        return
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        assert layer.number_of_states == 1
        for name, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            if states[0] is not None:
                yield "state", name, states[0][0]
    if getattr(layer, "keys", None) is not None:
        pool, first, second = ("latent", "latent", "rope") if latent else ("kv", "k", "v")
        pool = "swa" if layer.is_sliding else pool
        for name, content in ((first, layer.keys[0]), (second, layer.values[0])):
            by_token = content.transpose(0, 1)
            yield pool, name, by_token[:, 0] if latent else by_token
    if getattr(layer, "indexer_keys", None) is not None:
        yield "indexer", "indexer", layer.indexer_keys[0]


def kept(cache: DynamicCache, latent: bool) -> dict[str, dict[int, list[TensorSpec]]]:
    """By pool and model layer, what the cache holds per token or per sequence."""
    found: dict[str, dict[int, list[TensorSpec]]] = {}
    for index, layer in enumerate(cache.layers):
        for pool, name, content in tensors_of(layer, latent):
            shape = content.shape if pool == "state" else content.shape[1:]
            dtype = str(content.dtype).removeprefix("torch.")
            found.setdefault(pool, {}).setdefault(index, []).append(TensorSpec(name, tuple(shape), dtype))
    return found


def described(model: ModelDescription) -> dict[str, dict[int, list[TensorSpec]]]:
    return {
        pool.name: {layer: list(tensors) for layer, tensors in zip(pool.layers, pool.geometry.layers, strict=True)}
        for pool in model.pools
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", TINY)
def test_the_pools_of_a_family_are_what_transformers_keeps(family: str, dtype: str):
    cache = run(family, dtype)
    model = describe_model(tiny_config(family), PAGE, dtype)
    latent = "kv_lora_rank" in TINY[family].fields
    assert described(model) == kept(cache, latent)
    assert model.layer_count == len(cache.layers)
    for pool in model.pools:
        held = {Full: TOKENS, Window: WINDOW - 1, Checkpoint: 1}[type(pool.coverage)]
        found = [
            content for layer in cache.layers for name, _, content in tensors_of(layer, latent) if name == pool.name
        ]
        assert sum(content.nbytes for content in found) * pool.geometry.tokens_per_slot == held * pool.slot_bytes
        assert pool.geometry.tokens_per_slot == (1 if pool.name == "state" else PAGE)


def test_every_family_has_a_tiny_model():
    assert list(TINY) == list(FAMILIES)
    assert [family.model_type for family in TINY.values()] == list(TINY)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_field_means_what_transformers_makes_of_it(family: str):
    """Not only defaults: also fields that transformers computes from others."""
    full = AutoConfig.for_model(family)
    assert describe_model({"model_type": family}, PAGE) == describe_model(full, PAGE)
    assert describe_model({"model_type": family}, PAGE).layer_count == full.num_hidden_layers


@pytest.mark.parametrize("family", TINY)
def test_a_config_its_fields_and_its_file_give_the_same_description(family: str, tmp_path):
    config = tiny_config(family)
    config.save_pretrained(tmp_path)
    model = describe_model(config, PAGE)
    assert describe_model({"model_type": family, **TINY[family].fields}, PAGE) == model
    assert describe_model(json.loads((tmp_path / "config.json").read_text()), PAGE) == model


@pytest.mark.parametrize("family", TINY)
def test_a_tiny_checkpoint_is_the_tiny_model(family: str, tmp_path):
    write_tiny(family, tmp_path)
    classes: Any = AutoModelForCausalLM
    loaded, report = classes.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    built = build_tiny(family)
    expected = built.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(content, expected[name]) for name, content in loaded.state_dict().items())
    ids = torch.randint(0, VOCABULARY - 1, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        first, second = (
            model(input_ids=ids, position_ids=torch.arange(64)[None], use_cache=False).logits[0]
            for model in (loaded.eval(), built)
        )
    assert torch.allclose(first, second, rtol=0, atol=1e-5 * float(second.abs().max()))
    assert len(set(second.argmax(-1).tolist())) > 16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Hé €!")) == "Hé €!"
    assert (len(tokenizer), tokenizer.eos_token_id) == (VOCABULARY, VOCABULARY - 1)


def test_building_a_tiny_model_leaves_the_random_state_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second, other = build_tiny("llama"), build_tiny("llama"), build_tiny("llama", seed=1)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_a_window_counts_the_token_itself_and_a_chunk_starts_at_its_multiples():
    window, chunk = sliding_window_overlay(WINDOW), chunked_overlay(WINDOW, torch.zeros(1, dtype=torch.int))
    assert [key for key in range(26) if window(0, 0, 25, key)] == list(range(25 - WINDOW + 1, 26))
    assert [key for key in range(26) if chunk(0, 0, 25, key)] == list(range(20, 26))
    swa = {family: pools(family)["swa"] for family in ("mistral", "llama4_text")}
    assert [(pool.coverage, pool.chunk_tokens) for pool in swa.values()] == [
        (Window(WINDOW), None),
        (Window(WINDOW), WINDOW),
    ]


def test_layers_that_own_nothing_read_the_last_owner_of_their_kind():
    config = tiny_config("gemma4_text")
    found = pools("gemma4_text")
    assert config.kv_sharing_modes == [None, None, "store", "store", "reuse", "reuse"]
    assert {name: (pool.layers, pool.readers) for name, pool in found.items()} == {
        "kv": ((1, 3), ((5, 1),)),
        "swa": ((0, 2), ((4, 1),)),
    }
    assert [found["swa"].map_layer(layer) for layer in range(6)] == [0, None, 1, None, 1, None]
    assert [tensor.shape for layer in found["kv"].geometry.layers for tensor in layer] == [(2, 32)] * 4


def pools(family: str, **changes: Any) -> dict[str, Any]:
    fields = {"model_type": family, **TINY[family].fields, **changes}
    return {pool.name: pool for pool in describe_model(fields, PAGE).pools}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen2", {"use_sliding_window": False}, {"kv": (0, 1, 2, 3)}),
        ("qwen2", {}, {"kv": (0, 1), "swa": (2, 3)}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}, {"swa": (0, 1, 2, 3)}),
        ("mistral", {"sliding_window": None}, {"kv": (0, 1, 2, 3)}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 9}, {"kv": (0, 1, 2), "swa": (3,)}),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}, {"kv": (1, 3), "swa": (0, 2)}),
        ("gemma4_text", {"num_kv_shared_layers": 0}, {"kv": (1, 3, 5), "swa": (0, 2, 4)}),
        ("llama4_text", {"attention_chunk_size": None}, {"kv": (0, 1, 2, 3)}),
        ("glm_moe_dsa", {}, {"latent": (0, 1, 2, 3), "indexer": (0, 2)}),
        (
            "glm_moe_dsa",
            {"indexer_types": None, "index_topk_pattern": "FSSF"},
            {"latent": (0, 1, 2, 3), "indexer": (0, 3)},
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": None, "index_topk_freq": 2},
            {"latent": (0, 1, 2, 3), "indexer": (0, 1, 3)},
        ),
        (
            "deepseek_v32",
            {"layer_types": ["deepseek_sparse_attention"] * 4},
            {"latent": (0, 1, 2, 3), "indexer": (0, 1, 2, 3)},
        ),
        (
            "kimi_linear",
            {
                "layer_types": None,
                "linear_attn_config": {"kda_layers": [1, 3, 4], "full_attn_layers": [2], "num_heads": 2},
            },
            {"latent": (1,), "state": (0, 2, 3)},
        ),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
            {"kv": (2,), "state": (0, 1, 3)},
        ),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M*-EM"}, {"kv": (1,), "state": (0, 4)}),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [2]}, {"kv": (2,), "state": (0, 1, 3)}),
        ("olmo_hybrid", {"layer_types": None, "num_hidden_layers": 3}, {"kv": (2,), "state": (0, 1)}),
        ("falcon_h1", {}, {"kv": (0, 1, 2, 3), "state": (0, 1, 2, 3)}),
    ],
)
def test_other_fields_say_which_layers_keep_what(family: str, changes: dict[str, Any], expected: dict[str, Any]):
    assert {name: pool.layers for name, pool in pools(family, **changes).items()} == expected
    config = AutoConfig.for_model(family, **{**TINY[family].fields, **changes})
    assert describe_model(config, PAGE) == describe_model(
        {"model_type": family, **TINY[family].fields, **changes}, PAGE
    )


@pytest.mark.parametrize("family", ["bamba", "granitemoehybrid", "falcon_h1"])
def test_the_size_of_mamba_heads_may_be_left_to_the_model(family: str):
    assert pools(family, mamba_d_head="auto") == pools(family)


def test_pools_of_the_whole_prefix_come_first_and_every_pool_can_be_the_anchor():
    first = {family: next(iter(pools(family))) for family in TINY}
    assert {first[family] for family in ("llama", "gpt_oss", "qwen3_next")} == {"kv"}
    assert (first["kimi_linear"], first["mistral"], first["mamba2"]) == ("latent", "swa", "state")
    assert list(pools("deepseek_v32")) == ["latent", "indexer"]
    assert pools("deepseek_v32")["indexer"].derived_from == "latent"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "model type 'mamba' is Mamba-1: .* ignores its saved state"),
        ({"model_type": "falcon_mamba"}, "is Mamba-1"),
        ({"model_type": "jamba"}, "is Mamba-1"),
        ({"model_type": "zamba"}, "is Mamba-1"),
        ({"model_type": "deepseek_v4"}, "model type 'deepseek_v4' has cache layers of its own"),
        ({"model_type": "minimax"}, "model type 'minimax' has a cache class of its own"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 has soft-capped"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "sees later tokens"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "sees later tokens"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            "model type 'gemma3' has more inputs than text; model type 'gemma3_text' alone can be run",
        ),
        ({"model_type": "odd", "text_config": {"hidden_size": 3}}, "the model in its text_config alone can be run"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "model type 't5' .* is an encoder and a decoder"),
        ({"model_type": "llama", "add_cross_attention": True}, "attends to an encoder"),
        ({"model_type": "qwen3", "quantization_config": {"bits": 4}}, "has quantised weights"),
        ({"model_type": "llama", "per_layer_config": {"1": {"head_dim": 8}}}, "has layers that differ"),
        ({"model_type": "gpt2"}, "model type 'gpt2' is not supported; these are: llama, .*, olmo_hybrid"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(config: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as refusal:
        describe_model(config, PAGE)
    assert "\n" not in str(refusal.value)


def test_every_refused_type_is_one_that_transformers_has():
    for model_type in REFUSED:
        with pytest.raises(ConfigError, match=f"model type '{model_type}'"):
            describe_model(AutoConfig.for_model(model_type), PAGE)
    assert not set(REFUSED) & set(FAMILIES)


MAMBA1 = {
    "mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "falcon_mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 8},
}


@pytest.mark.parametrize("family", MAMBA1)
def test_the_reason_against_mamba_1_holds(family: str):
    """A second chunk of several tokens is wrong, one token at a time is right: when this fails, run these models."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
    torch.manual_seed(0)
    classes: Any = AutoModelForCausalLM
    model = classes.from_config(AutoConfig.for_model(family, **sizes, **heads, **MAMBA1[family])).eval()
    ids = torch.randint(0, 64, (1, 24))

    def in_chunks(ends: Iterable[int]) -> torch.Tensor:
        cache, start, logits = DynamicCache(config=model.config), 0, []
        for end in ends:
            logits.append(model(input_ids=ids[:, start:end], cache=cache, use_cache=True).logits[0])
            start = end
        return torch.cat(logits)

    with torch.inference_mode():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
        whole = in_chunks([24])
        scale = float(whole.abs().max())
        assert float((in_chunks(range(1, 25)) - whole).abs().max()) < 1e-4 * scale
        assert float((in_chunks([12, 24]) - whole).abs().max()) > 1e-2 * scale


@pytest.mark.parametrize("wrapper", ["gemma3", "gemma4", "llama4", "qwen3_5"])
def test_a_model_with_more_inputs_than_text_names_its_text_model(wrapper: str):
    with pytest.raises(ConfigError, match=f"model type '{wrapper}' .* model type '{wrapper}_text' alone can be run"):
        describe_model(AutoConfig.for_model(wrapper), PAGE)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"layer_types": ["full_attention", "conv"] * 2}, "layers of type conv, which are not kept"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "num_hidden_layers=4, but types for 3 layers"),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types='full_attention'; it must be a list of names"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "sliding_window=None; it must be a whole number above 0"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "make it run sliding_attention"),
        ("bamba", {"layer_types": ["full_attention"] * 4}, "make it run full_attention, linear_attention"),
        ("nemotron_h", {"layers_block_type": ["mlp", "moe"]}, "no layer that keeps anything"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M?"}, r"layers of type \?"),
        ("gemma4_text", {"num_kv_shared_layers": 6}, "num_kv_shared_layers=6: no layer before these"),
        ("gemma4_text", {"num_kv_shared_layers": 5}, "num_kv_shared_layers=5: no layer before these"),
        ("gemma4_text", {"per_layer_config": {"1": {"sliding_window": 3}}}, "only head sizes and KV heads may differ"),
        ("gemma4_text", {"per_layer_config": {"full_attention": {}}}, "only head sizes and KV heads may differ"),
        ("zamba2", {"n_mamba_heads": 7}, "the inner size=128, which 7 Mamba heads can't share evenly"),
        ("zamba2", {"num_attention_heads": 3}, "twice the hidden_size=128, which 3 heads can't share evenly"),
        ("bamba", {"mamba_n_heads": True}, "mamba_n_heads=True; it must be a whole number above 0"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank=None"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(family: str, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=f"model type '{family}' with .*{message}"):
        pools(family, **changes)


DOCUMENT = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of the document, without its header."""
    section = DOCUMENT.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_the_document_lists_every_family_with_its_pools():
    listed = {name: set(names(cells[1])) for cells in rows("Families") for name in names(cells[0])}
    possible = {
        family: {kind.pool for kinds in declared.keeps.values() for kind in kinds}
        for family, declared in FAMILIES.items()
    }
    assert listed == possible
    assert {name for cells in rows("Pools") for name in names(cells[0])} == set().union(*possible.values())


def test_the_document_lists_every_refused_type_with_its_reason():
    listed = {name: cells[1] for cells in rows("Refused") for name in names(cells[0])}
    assert list(listed) == list(REFUSED)
    words = {"mamba": "Mamba-1", "jamba": "Mamba-1", "deepseek_v4": "cache layers", "minimax": "cache class"}
    assert all(word in listed[name] and word in REFUSED[name] for name, word in words.items())


def test_the_descriptions_in_the_document_run():
    described = []
    for program in re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL):
        found: dict[str, Any] = {}
        exec(program, found)
        described.append([pool.name for pool in found["model"].pools])
        if "cache" in found:
            found["cache"].close()
    assert described == [["kv", "state"], ["odd", "near", "memo"]]
