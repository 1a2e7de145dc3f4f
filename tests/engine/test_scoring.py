"""Attention with sinks and soft caps is the plain formula."""

import numpy as np
import pytest
import torch

from hicache.engine.attention import Scoring, attend, score_bias
from hicache.engine.token_pools import Sight


def plainly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Row by row and head by head, in float64."""
    _, heads, rows, dim = query.shape
    group = heads // keys.shape[1]
    scale = dim**-0.5 if scoring.scale is None else scoring.scale
    result = torch.zeros(rows, heads, values.shape[-1], dtype=torch.float64)
    for head in range(heads):
        for row in range(rows):
            scores = [float(query[0, head, row].double() @ key.double()) * scale for key in keys[0, head // group]]
            if scoring.softcap:
                scores = [float(np.tanh(score / scoring.softcap)) * scoring.softcap for score in scores]
            weights = np.exp(scores) * visible[row].numpy()
            total = weights.sum() + (0.0 if scoring.sinks is None else float(scoring.sinks[head].double().exp()))
            for weight, value in zip(weights, values[0, head // group], strict=True):
                result[row, head] += weight / total * value.double()
    return result


@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-1.0, 0.5, 2.0, 0.0])])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_is_the_plain_formula(rows: int, softcap: float, sinks: torch.Tensor | None, scale: float | None):
    random = torch.Generator().manual_seed(rows)
    query = torch.randn(1, 4, rows, 8, generator=random) * 2
    keys, values = torch.randn(1, 2, 12, 8, generator=random), torch.randn(1, 2, 12, 5, generator=random)
    at = torch.arange(5, 5 + -(-rows // 4) * 4).clamp(max=11)
    visible = Sight(window=7).visible(at, torch.arange(12))
    scoring = Scoring(scale, softcap, sinks)
    attended = attend(query, keys, values, score_bias(visible, query.dtype), scoring)
    assert torch.allclose(attended.double(), plainly(query, keys, values, visible, scoring), atol=2e-6)
