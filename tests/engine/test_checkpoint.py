"""What can't be run right is refused by name before weights are read; equal models share a namespace, others don't."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from hicache.engine.checkpoint import open_checkpoint
from hicache.engine.model import load_model, load_tokenizer
from hicache.errors import ConfigError
from hicache.keys import FingerprintMemo
from hicache.testing.families import write_tiny
from tests.engine.tiny import EOS, PAGE, write_checkpoint


def with_config(folder: Path, target: Path, **changes) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def namespace(folder: Path, dtype: str = "float32", page_size: int = PAGE):
    return open_checkpoint(folder, dtype, page_size).namespace(dtype, page_size, FingerprintMemo())


def test_a_checkpoint_is_read_without_its_weights(checkpoint):
    known = open_checkpoint(checkpoint, "float32", PAGE)
    assert (known.vocabulary, known.max_positions, known.end_of_text) == (300, 2048, frozenset([EOS]))
    assert known.weights_bytes == load_model(checkpoint, torch.float32).nbytes
    assert open_checkpoint(checkpoint, "bfloat16", PAGE).weights_bytes == known.weights_bytes // 2


@pytest.mark.parametrize(("family", "positions"), [("gemma4_text", 32768), ("kimi_linear", 32768), ("mamba2", 32768)])
def test_every_family_says_how_long_a_prompt_may_be(family, positions, tmp_path):
    assert open_checkpoint(write_tiny(family, tmp_path), "float32", PAGE).max_positions == positions


def test_a_model_that_names_no_bound_has_a_large_one(tmp_path):
    folder = write_tiny("mamba2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder, "float32", PAGE).max_positions == 1 << 20


def test_the_generation_config_says_what_ends_an_answer(checkpoint, tmp_path):
    folder = with_config(checkpoint, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert open_checkpoint(folder, "float32", PAGE).end_of_text == frozenset([3, 5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "jamba"}, "jamba"),
        ({"model_type": "minimax"}, "minimax"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quanti"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "llama.*'dynamic'"),
        ({"model_type": "nonsense"}, "nonsense"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(checkpoint, tmp_path, changes, message):
    folder = with_config(checkpoint, tmp_path / "model", **changes)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(folder, "float32", PAGE)


def test_weights_in_a_pickle_are_refused(checkpoint, tmp_path):
    folder = with_config(checkpoint, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors.*pickle"):
        open_checkpoint(folder, "float32", PAGE)
    with pytest.raises(ConfigError, match="can't be loaded"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x08" + b"\0" * 7 + b"not json", b"\x02" + b"\0" * 7 + b"{"])
def test_a_damaged_weights_file_is_named(checkpoint, tmp_path, content):
    folder = with_config(checkpoint, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a whole"):
        open_checkpoint(folder, "float32", PAGE)


def test_weights_that_are_not_there_are_not_made_up(checkpoint, tmp_path):
    folder = with_config(checkpoint, tmp_path / "model", num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"lacks .* weights .*layers\.3\."):
        load_model(folder, torch.float32)


def test_weights_that_are_tied_are_not_missing(tmp_path):
    folder = write_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    assert load_model(folder, torch.float32).nbytes > 0


def test_weights_of_another_shape_are_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="can't be loaded"):
        load_model(with_config(checkpoint, tmp_path / "model", intermediate_size=100), torch.float32)


def test_a_value_of_the_wrong_type_is_told_in_one_line(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="hidden_size") as caught:
        open_checkpoint(with_config(checkpoint, tmp_path / "model", hidden_size="64"), "float32", PAGE)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_makes_no_sense_is_told_in_one_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match=r"tokenizer in .* can't be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        open_checkpoint(tmp_path, "float32", PAGE)


def test_a_copy_under_another_name_shares_pages(checkpoint, tmp_path):
    copied = with_config(checkpoint, tmp_path / "other-name", _name_or_path="x", transformers_version="1")
    assert namespace(copied) == namespace(checkpoint)


def test_what_changes_the_bytes_changes_the_namespace(checkpoint, tmp_path):
    others = [
        namespace(checkpoint, dtype="bfloat16"),
        namespace(checkpoint, page_size=2 * PAGE),
        namespace(with_config(checkpoint, tmp_path / "eps", rms_norm_eps=1e-3)),
        namespace(write_checkpoint(tmp_path / "heads", num_key_value_heads=4)),
    ]
    fingerprints = {one.fingerprint for one in (namespace(checkpoint), *others)}
    assert len(fingerprints) == 5
