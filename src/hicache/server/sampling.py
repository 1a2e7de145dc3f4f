"""What a request leaves open has OpenAI's default, whatever the model: temperature 1, top_p 1, nothing else cut off."""

from hicache.engine.types import SamplingParams
from hicache.server.schema import ChatRequest, CompletionRequest


def sampling_params(body: ChatRequest | CompletionRequest, max_tokens: int) -> SamplingParams:
    """`max_tokens` is what the context has room for at most."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        stop=body.stop,
        ignore_eos=bool(body.ignore_eos),
    )
