"""Attention of some rows over some keys: the bits of a row depend on neither the rows nor the padding beside it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from hicache.engine.segment import ROW_BLOCK, padded


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores become weights: their scale, a soft cap (0: none), and per head a sink that takes weight away."""

    scale: float | None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Attention of `query` [1, heads, rows, dim] over `keys`, `values` [1, kv heads, tokens, dim]: [rows, heads, dim].

    `bias` [padded rows, tokens] is added to the scores: see `score_bias`. Each row may look at one token at least.
    """
    rows = query.shape[2]
    block = functional.pad(query, (0, 0, 0, padded(rows, ROW_BLOCK) - rows))
    if scoring.sinks is None and not scoring.softcap:
        attended = functional.scaled_dot_product_attention(
            block, keys, values, attn_mask=bias, scale=scoring.scale, enable_gqa=True
        )
    else:
        attended = _attend_plainly(block, keys, values, bias, scoring)
    return attended[0, :, :rows].transpose(0, 1)


def score_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What to add to scores so that only what is `visible` (bool) counts: 0 there, minus infinity elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def _attend_plainly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    groups = query.shape[1] // keys.shape[1]
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = torch.matmul(query, keys.repeat_interleave(groups, 1).transpose(2, 3)) * scale
    if scoring.softcap:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores + bias
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores.float(), -1)[..., : keys.shape[2]].to(query.dtype)
    return torch.matmul(weights, values.repeat_interleave(groups, 1))
