"""What a request leaves open is filled in here, once: the model's own defaults, else OpenAI's."""

from hicache.engine.types import SamplingParams
from hicache.server.schema import ChatRequest, CompletionRequest


def sampling_params(body: ChatRequest | CompletionRequest, max_tokens: int, defaults: SamplingParams) -> SamplingParams:
    """`max_tokens` is what the context has room for at most."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=max(0, defaults.top_k if body.top_k is None else body.top_k),
        min_p=_or(body.min_p, defaults.min_p),
        seed=body.seed,
        stop=body.stop,
        ignore_eos=bool(body.ignore_eos),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
