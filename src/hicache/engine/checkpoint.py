"""A checkpoint folder as the engine sees it; what can't be run right is refused by name before anything is loaded."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.builder import ModelDescription, describe_model
from hicache.engine.model import RawConfig, read_config
from hicache.errors import ConfigError
from hicache.keys import FingerprintMemo, Namespace, weights_fingerprint

_POSITION_BOUND_ROPE = ("default", "linear", "proportional", "llama3", "yarn")
_POSITION_BOUNDS = ("max_position_embeddings", "model_max_length")
_UNBOUNDED = 1 << 20
"""Positions of a model that names no bound: recurrent state has none."""
_NOT_IDENTITY = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is known of a model before its weights are read. `end_of_text` are the ids that end an answer.

    `mtp_layers`: how many layers behind the model's own guess tokens ahead. `joint_layer_inputs`: one embedding holds
    inputs of all layers, so that the first ones alone can't be run.
    """

    folder: Path
    model_type: str
    description: ModelDescription
    config_digest: str
    vocabulary: int
    max_positions: int
    end_of_text: frozenset[int]
    weights_bytes: int
    mtp_layers: int
    joint_layer_inputs: bool

    def namespace(self, dtype: str, page_size: int, memo: FingerprintMemo) -> Namespace:
        """What sets this model's pages apart. Reads the weights once; `memo` spares it later."""
        return Namespace(
            model=self.config_digest,
            weights=weights_fingerprint(_weights(self.folder), memo),
            dtype=dtype,
            page_size=page_size,
            geometry=self.description.fingerprint,
        )


def open_checkpoint(folder: Path, dtype: str, page_size: int) -> Checkpoint:
    """Reads the configs in `folder`. Raises ConfigError, with model type and reason, for what can't be run."""
    raw = read_config(folder)
    config = raw.values
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"model type {config['model_type']!r} is an encoder and a decoder; a decoder alone is needed")
    description = describe_model(config, page_size, dtype)
    _refuse_rope(config)
    return Checkpoint(
        folder=folder,
        model_type=str(config["model_type"]),
        description=description,
        config_digest=_digest(config),
        vocabulary=int(config["vocab_size"]),
        max_positions=min([int(config[name]) for name in _POSITION_BOUNDS if config.get(name)], default=_UNBOUNDED),
        end_of_text=_end_of_text(raw),
        weights_bytes=_parameters(folder) * (4 if dtype == "float32" else 2),
        mtp_layers=_mtp_layers(folder, config, description.layer_count),
        joint_layer_inputs=bool(config.get("hidden_size_per_layer_input")),
    )


def differences(one: Path, other: Path) -> list[str]:
    """The fields in which the configs of two checkpoints differ, those aside that make no difference to any page."""
    first, second = read_config(one).values, read_config(other).values
    names = sorted((first.keys() | second.keys()) - set(_NOT_IDENTITY))
    return [name for name in names if str(first.get(name)) != str(second.get(name))]


def _refuse_rope(config: Any) -> None:
    rope = config.get("rope_parameters") or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]
    for kind in [part.get("rope_type", "default") for part in nested or [rope]]:
        if kind in _POSITION_BOUND_ROPE:
            continue
        raise ConfigError(
            f"model type {config['model_type']!r} has rope_type {kind!r}, which turns a key by more than its own"
            f" position, so that pages can't be shared; these can: {', '.join(_POSITION_BOUND_ROPE)}"
        )


def _digest(config: Any) -> str:
    identity = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def _end_of_text(raw: RawConfig) -> frozenset[int]:
    given = raw.generation.get("eos_token_id")
    if given is None:
        given = raw.values.get("eos_token_id")
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else given)


def _weights(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors; only weights in that form are read (a pickle can run code)")
    return files


def _mtp_layers(folder: Path, config: Any, layers: int) -> int:
    """MTP layers that the config names and the weights have: a family's config names one that many files lack."""
    named = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
    tensors = {name for path in _weights(folder) for name in _tensors_in(path)}
    there = [f"layers.{layer}.eh_proj.weight" for layer in range(layers, layers + named)]
    return named if named and all(any(name.endswith(f".{one}") for name in tensors) for one in there) else 0


def _parameters(folder: Path) -> int:
    """Parameters over all files: from their headers, not their bytes."""
    return sum(_product(shape) for path in _weights(folder) for shape in _tensors_in(path).values())


def _tensors_in(path: Path) -> dict[str, list[int]]:
    """The tensors in a file, with their shapes."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}") from error


def _product(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
