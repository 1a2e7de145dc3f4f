"""A tiny random model with a tokenizer of its own, and engines over it, in seconds."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hicache.config import CacheConfig, ServeConfig, Settings
from hicache.engine import Chunk, Engine, SamplingParams, create_engine
from hicache.testing.families import write_tokenizer

LAYERS = 3
PAGE = 8
EOS = 256
VOCABULARY = 300
PAGE_BYTES = LAYERS * 2 * 2 * 16 * 4 * PAGE


def write_checkpoint(folder: Path, model_type: str = "llama", **overrides: Any) -> Path:
    """A random model of `model_type` with 3 layers, 2 KV heads of size 16, and a byte-level tokenizer."""
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(7)
    config: Any = AutoConfig.for_model(model_type, **(fields | overrides))
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    write_tokenizer(folder, EOS)
    return folder


def settings(folder: Path, cache_folder: Path, **changes: Any) -> Settings:
    """Settings for the tiny model: 200 device pages, 400 host pages. Changes are fields of either group."""
    cache: dict[str, Any] = {"device_size": 202 * PAGE_BYTES, "host_size": 400 * PAGE_BYTES, "page_size": PAGE}
    serve: dict[str, Any] = {"model": str(folder), "cache_folder": cache_folder, "chunk_tokens": 64, "threads": 1}
    for name, value in changes.items():
        (cache if name in CacheConfig.model_fields else serve)[name] = value
    return Settings(cache=CacheConfig(**cache), serve=ServeConfig(**serve))


@contextmanager
def running(given: Settings) -> Iterator[Engine]:
    engine = create_engine(given)
    try:
        yield engine
    finally:
        engine.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 250, length)]


def collect(chunks: Iterable[Chunk]) -> tuple[list[int], Chunk]:
    """All token ids of an answer, and its last chunk."""
    got = list(chunks)
    assert [chunk.finish_reason is None for chunk in got] == [True] * (len(got) - 1) + [False]
    return [token for chunk in got for token in chunk.token_ids], got[-1]


def ask(engine: Engine, ids: Sequence[int], max_tokens: int = 8, **params: Any) -> tuple[list[int], Chunk]:
    return collect(engine.submit(ids, SamplingParams(max_tokens=max_tokens, **params)))
