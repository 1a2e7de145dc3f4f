"""What a request leaves open has OpenAI's default, whatever the model: temperature 1, top_p 1, nothing else cut off."""

from collections.abc import Sequence

from hicache.engine.types import CACHED, Ask, SamplingParams
from hicache.server.schema import ChatRequest, CompletionRequest
from hicache.server.tenants import Tenant


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


def ask_of(
    body: ChatRequest | CompletionRequest, prompt_ids: Sequence[int], params: SamplingParams, tenant: Tenant
) -> Ask:
    """One prompt of `body` as the engine takes it: the pages are the tenant's, whatever salt the body has."""
    return Ask(
        prompt_ids,
        params,
        salt=body.cache_salt or "",
        priority=body.priority or 0,
        tenant=tenant.identity,
        cache=CACHED if body.cache is None else body.cache.use(),
    )
