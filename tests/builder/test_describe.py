"""What a model's config says becomes pools, or a refusal that names the model and the reason."""

import pytest

from hicache.builder import (
    ModelDescription,
    PoolDescription,
    attention_pool,
    chunked_pool,
    describe_model,
    full_attention,
    indexer_pool,
    latent_pool,
    state_pool,
    window_pool,
)
from hicache.coverage import Checkpoint, Window
from hicache.errors import ConfigError
from hicache.layout import PoolGeometry, TensorSpec

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": None,
    "dtype": "torch.float16",
    "sliding_window": 4096,
    "use_sliding_window": False,
}


class Config:
    """What transformers' configs have in common."""

    def __init__(self, fields):
        self.fields = fields

    def to_dict(self):
        return dict(self.fields)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, full_attention(3, 2, 16, "bfloat16", 8)),
        (QWEN, full_attention(2, 6, 16, "float16", 8)),
        (LLAMA | {"num_key_value_heads": None, "head_dim": 5}, full_attention(3, 4, 5, "bfloat16", 8)),
        ({k: v for k, v in LLAMA.items() if k != "torch_dtype"}, full_attention(3, 2, 16, "float32", 8)),
        (QWEN | {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, describe_model(QWEN, 8)),
    ],
)
def test_a_model_of_full_attention_has_one_pool(config, expected):
    assert describe_model(config, 8) == expected
    assert describe_model(Config(config), 8) == expected


def test_a_page_holds_k_and_v_of_every_layer():
    model = describe_model(LLAMA, 8, dtype="float32")
    assert model.slot_bytes == 3 * 2 * 8 * 2 * 16 * 4
    assert [pool.name for pool in model.pools] == ["kv"]
    assert [model.pools[0].map_layer(layer) for layer in (0, 2, 3)] == [0, 2, None]


def test_what_changes_the_bytes_of_a_page_changes_the_fingerprint():
    variants = [
        describe_model(LLAMA, 8),
        describe_model(LLAMA, 16),
        describe_model(LLAMA, 8, "float32"),
        describe_model(LLAMA | {"num_hidden_layers": 4}, 8),
        describe_model(LLAMA | {"num_key_value_heads": 4}, 8),
    ]
    assert len({model.fingerprint for model in variants}) == len(variants)
    draft = PoolGeometry.uniform(1, (TensorSpec("k", (2,), "uint8"),), 8)
    packed = ModelDescription(
        3, (PoolDescription("kv", variants[0].pools[0].geometry, (0, 1, 2), Window(9), None, (draft,)),)
    )
    assert packed.fingerprint != variants[0].fingerprint
    assert packed.slot_bytes == variants[0].slot_bytes + draft.slot_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2' is not supported; these are: llama, qwen2"),
        ({"model_type": None}, "model type None is not supported"),
        ({"kv_lora_rank": 512}, r"'llama' with kv_lora_rank=512 has latent attention \(MLA\)"),
        ({"attention_chunk_size": 8192}, "chunked attention"),
        ({"index_topk": 2048}, "an indexer"),
        ({"mamba_d_state": 16}, "Mamba state"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_attention in its list, but its other fields make it run full",
        ),
        ({"sliding_window": 1024}, "sliding_window=1024"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None; it must be a whole number above 0"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads='2'"),
        ({"num_attention_heads": 5}, "hidden_size=64, which 5 heads can't share evenly; give head_dim"),
        ({"torch_dtype": "float7"}, "dtype 'float7' is not known"),
    ],
)
def test_what_is_not_kept_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        describe_model(LLAMA | changes, 8)
    assert "\n" not in str(refusal.value)


def test_a_field_that_is_absent_has_the_default_of_the_model_type():
    config = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 64}
    assert describe_model(config, 8) == full_attention(32, 4, 16, "float32", 8)


def test_a_config_without_a_model_type_is_refused():
    with pytest.raises(ConfigError, match=r"model type '\(no model_type\)' is not supported"):
        describe_model({}, 8)


def test_a_description_must_be_of_the_page_size_it_is_used_with():
    model = full_attention(2, 2, 8, "float32", 16)
    assert describe_model(model, 16) is model
    with pytest.raises(ConfigError, match="page_size=8: a slot of pool 'kv' holds 16 tokens"):
        describe_model(model, 8)
    state = PoolGeometry.uniform(1, (TensorSpec("x", (4,), "uint8"),), 1)
    snapshots = ModelDescription(1, (PoolDescription("state", state, (0,), Checkpoint()),))
    assert describe_model(snapshots, 16) is snapshots


HEADS = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize(
    ("config", "pools"),
    [
        (
            {"model_type": "gpt_oss", "sliding_window": 9, "num_hidden_layers": 3},
            (attention_pool([1], 2, 16, "float32", 8), window_pool([0, 2], 9, 2, 16, "float32", 8)),
        ),
        (
            {"model_type": "llama4_text", "no_rope_layers": [1, 0, 1], "attention_chunk_size": 9},
            (attention_pool([1], 2, 16, "float32", 8), chunked_pool([0, 2], 9, 2, 16, "float32", 8)),
        ),
        (
            {"model_type": "deepseek_v32", "kv_lora_rank": 32, "qk_rope_head_dim": 8, "index_head_dim": 6},
            (latent_pool(range(3), 32, 8, "float32", 8), indexer_pool(range(3), 6, "float32", 8)),
        ),
        (
            {"model_type": "lfm2", "full_attn_idxs": [1], "hidden_size": 64, "conv_L_cache": 3},
            (
                attention_pool([1], 2, 16, "float32", 8),
                state_pool([0, 2], (TensorSpec("conv", (64, 3), "float32"),)),
            ),
        ),
    ],
)
def test_a_model_without_a_config_is_described_pool_by_pool(config, pools):
    assert describe_model(HEADS | config, 8) == ModelDescription(3, pools)
