"""The reference engine: transformers models with continuous batching; the same tokens with the cache and without it.

The names here are loaded when they are first used: what only needs `SamplingParams` and its like loads no torch.
"""

from typing import TYPE_CHECKING

from hicache.engine.types import Ask, Chunk, FinishReason, SamplingParams, Usage

if TYPE_CHECKING:
    from hicache.engine.engine import Engine, EngineStats
    from hicache.engine.launch import create_engine
    from hicache.engine.operations import Audit
    from hicache.engine.stream import Stream

__all__ = [
    "Ask",
    "Audit",
    "Chunk",
    "Engine",
    "EngineStats",
    "FinishReason",
    "SamplingParams",
    "Stream",
    "Usage",
    "create_engine",
]

_HOMES = {
    "Audit": "hicache.engine.operations",
    "Engine": "hicache.engine.engine",
    "EngineStats": "hicache.engine.engine",
    "Stream": "hicache.engine.stream",
    "create_engine": "hicache.engine.launch",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return vars(import_module(_HOMES[name]))[name]
