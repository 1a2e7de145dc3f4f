"""The only place that touches transformers, which is partly untyped: everything that leaves it has a type."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import MtpModel
from transformers.utils import logging as transformers_logging

from hicache.engine.attention import Scoring
from hicache.engine.segment import ROW_BLOCK, padded
from hicache.engine.step import Step
from hicache.errors import ConfigError

_ATTENTION = "hicache_paged"
_STEP = "hicache_step"
_LAST = -1
_LAYERS = "layers"
_REASON_CHARACTERS = 500


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the engine and its server use."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class RawConfig:
    """A checkpoint's config and generation config as plain values, family defaults filled in."""

    values: Mapping[str, Any]
    generation: Mapping[str, Any]


class CausalModel:
    """A decoder whose state lies in pools; stateless itself, so one instance serves all steps."""

    def __init__(self, module: Any) -> None:
        self._module = module.eval()
        self._module.set_attn_implementation(_ATTENTION)
        self._counts_positions = bool(module.config.to_dict().get("attn_temperature_tuning"))

    @property
    def module(self) -> Any:
        """The model of transformers."""
        return self._module

    @property
    def one_sequence_per_forward(self) -> bool:
        """Whether the model counts positions by itself, from the length of one sequence, and is wrong for several."""
        return self._counts_positions

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs all rows of the step.

        Returns the logits of the rows that want them, float32 [rows, vocabulary], and the last hidden states of all
        rows, [rows, hidden size].
        """
        rows = step.rows
        wanted = rows.logit_rows()
        fill = wanted[-1:] * (padded(len(wanted), ROW_BLOCK) - len(wanted))
        stacked = rows.batch > 1
        output = self._module(
            input_ids=rows.token_ids(),
            position_ids=rows.positions(),
            attention_mask=step.mask(),
            cache=step,
            use_cache=True,
            output_hidden_states=_LAST,
            logits_to_keep=0 if stacked else torch.tensor(wanted + fill),
            **{_STEP: step},
        )
        logits: torch.Tensor = output.logits.flatten(0, 1)
        hidden: torch.Tensor = output.hidden_states[-1].flatten(0, 1)
        return logits[: len(wanted)].float(), hidden

    def copy_from(self, other: "CausalModel") -> None:
        """Take the weights of a model of the same architecture, which `misfit` says it is."""
        _copy(self._module, other._module)

    def misfit(self, other: "CausalModel") -> str | None:
        """Which tensor of another model this one has no place for; None when all fit."""
        return _misfit(self._module, other._module)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(parameter.nbytes for parameter in self._module.parameters())

    def first_layers(self, layers: int) -> "CausalModel":
        """A model made of its first `layers` layers and all that is not a layer. It shares the weights."""
        parts = self._module.named_children()
        name, decoder = next((name, part) for name, part in parts if _LAYERS in dict(part.named_children()))
        config = copy.deepcopy(self._module.config)
        config.num_hidden_layers = layers
        kept = torch.nn.ModuleList([_twin(layer) for layer in decoder.layers[:layers]])
        shorter = _twin(decoder, **{_LAYERS: kept})
        module = _twin(self._module, **{name: shorter})
        shorter.config = module.config = config
        return CausalModel(module)


class MtpLayers:
    """The layers of a checkpoint that guess tokens ahead; its embeddings and head are the model's own."""

    def __init__(self, module: Any) -> None:
        self._module = module.eval()

    def copy_from(self, other: "MtpLayers") -> None:
        """Take the weights of layers of the same architecture, which `misfit` says they are."""
        _copy(self._module, other._module)

    def misfit(self, other: "MtpLayers") -> str | None:
        """Which tensor of other layers these have no place for; None when all fit."""
        return _misfit(self._module, other._module)

    @torch.inference_mode()
    def forward(self, depth: int, hidden: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the layer at `depth` on hidden states [rows, hidden size] and the tokens that the step's rows name.

        Returns the hidden states after it, of all rows with those that pad, and the logits, float32
        [rows, vocabulary], of the rows that want them.
        """
        rows = step.rows
        padding = hidden.new_zeros(rows.count - len(hidden), hidden.shape[1])
        states: torch.Tensor = self._module.forward_layer(
            depth,
            torch.cat((hidden, padding))[None],
            rows.positions() + 1 + depth,
            step,
            input_ids=rows.token_ids(),
            **{_STEP: step},
        )[0]
        logits: torch.Tensor = self._module._project_to_logits(states[rows.logit_rows()])
        return states, logits.float()


def load_mtp(model: CausalModel) -> MtpLayers:
    """All MTP layers of a model's checkpoint. Raises ConfigError when their weights are not whole."""
    module = model.module
    first, count = module.config.num_hidden_layers, module.config.num_mtp_layers
    # transformers finds these weights by layer numbers that it knows of published checkpoints only
    module._keys_to_ignore_on_load_unexpected = [rf"layers\.{layer}\." for layer in range(first, first + count)]
    with _refused("the MTP layers can't be loaded"):
        return MtpLayers(MtpModel.from_pretrained(module))


def read_config(folder: Path) -> RawConfig:
    """The config of the checkpoint in `folder`. Raises ConfigError when transformers can't make sense of it."""
    generation: dict[str, Any] = {}
    with _refused(f"{folder} is no checkpoint that transformers can read"):
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if (folder / "generation_config.json").is_file():
            from transformers import GenerationConfig

            generation = GenerationConfig.from_pretrained(folder, local_files_only=True).to_dict()
    return RawConfig(config.to_dict(), generation)


def load_model(folder: Path, dtype: torch.dtype) -> CausalModel:
    """The model in `folder`, its weights as `dtype`, in CPU memory. Only safetensors are read: a pickle is refused.

    So is a checkpoint that lacks weights: transformers would make them up, others in each process.
    """
    _quiet()
    options: Any = {"dtype": dtype, "local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    with _refused(f"the model in {folder} can't be loaded"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    module, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise ConfigError(
            f"the model in {folder} lacks {len(missing)} of the weights that its config.json asks for,"
            f" such as {missing[0]}"
        )
    return CausalModel(module)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`."""
    with _refused(f"the tokenizer in {folder} can't be loaded"):
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, clean_up_tokenization_spaces=False
        )
    return cast(Tokenizer, tokenizer)


def load_vocabulary(folder: Path) -> Mapping[str, int] | None:
    """The tokens of the tokenizer in `folder` with their ids; None where there is no tokenizer."""
    if not (folder / "tokenizer_config.json").is_file():
        return None
    tokenizer: Any = load_tokenizer(folder)
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    return vocabulary


def _misfit(module: Any, other: Any) -> str | None:
    own, theirs = module.state_dict(), other.state_dict()
    for name in sorted(own.keys() | theirs.keys()):
        if name not in own or name not in theirs:
            return f"{name} is in one of them only"
        if (own[name].shape, own[name].dtype) != (theirs[name].shape, theirs[name].dtype):
            here, there = ((list(one.shape), one.dtype) for one in (own[name], theirs[name]))
            return f"{name} is {there}, not {here}"
    return None


@torch.no_grad()
def _copy(module: Any, other: Any) -> None:
    theirs = other.state_dict()
    for name, tensor in module.state_dict().items():
        tensor.copy_(theirs[name])


def _twin(module: Any, **children: Any) -> Any:
    """A module with some other children and hooks of its own; it shares everything else."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **children}
    twin._forward_hooks = module._forward_hooks.copy()
    return twin


def _quiet() -> None:
    """No progress bars, which only get into a server's log."""
    library: Any = transformers_logging
    library.disable_progress_bar()


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    step: Step = arguments[_STEP]
    scoring = Scoring(scaling, arguments.get("softcap") or 0.0, arguments.get("s_aux"))
    return step.attend(module.layer_idx, query, key, value, scoring, arguments.get("indices")), None


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Files that make no sense fail inside transformers in any way there is: one line says so."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"{what}: {kind}{' '.join(str(error).split())[:_REASON_CHARACTERS]}") from error


AttentionInterface.register(_ATTENTION, _attend)
