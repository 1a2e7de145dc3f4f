"""What goes over the wire has OpenAI's shape; hicache only adds `cached_tokens_by_tier` to the usage."""

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hicache.engine.types import Usage
from hicache.units import Tier

Json = dict[str, object]

TIERS = tuple(tier.value for tier in Tier)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that every object of one response has in common. `created` is in Unix seconds."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: str, fingerprint: str) -> "Envelope":
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, fingerprint)

    def wrap(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


def usage_json(usages: Iterable[Usage]) -> Json:
    """The sum over the prompts of one request; every tier is listed, zero included."""
    prompt = completion = 0
    cached = dict.fromkeys(TIERS, 0)
    for usage in usages:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        for tier in TIERS:
            cached[tier] += usage.cached_tokens.get(tier, 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values()), "cached_tokens_by_tier": cached},
    }


def chat_choice(text: str, finish_reason: str) -> Json:
    message: Json = {"role": "assistant", "content": text, "refusal": None}
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}


def chat_delta(delta: Mapping[str, str], finish_reason: str | None) -> Json:
    return {"index": 0, "delta": dict(delta), "logprobs": None, "finish_reason": finish_reason}


def text_choice(index: int, text: str, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
