"""The next token is a pure function of logits, parameters, seed and position, whatever else is in the batch."""

import secrets

import numpy as np
import numpy.typing as npt

from hicache.engine.types import SamplingParams

FloatArray = npt.NDArray[np.float64]


class Sampler:
    """Chooses the tokens of one request. The draw for answer token n depends on the seed and n alone.

    So a request that is preempted and computed again goes on as if nothing had happened.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._seed = secrets.randbits(64) if params.seed is None else params.seed

    def choose(self, logits: npt.NDArray[np.float32], position: int) -> int:
        """The token for answer position `position` (0 is the first). `logits` is float32 [vocabulary]."""
        if self._params.temperature == 0.0:
            return int(logits.argmax())
        tokens, probabilities = distribution(logits, self._params)
        cumulative = probabilities.cumsum()
        draw = _uniform(self._seed, position) * cumulative[-1]
        index = min(int(np.searchsorted(cumulative, draw, side="right")), len(tokens) - 1)
        return int(tokens[index])


def distribution(logits: npt.NDArray[np.float32], params: SamplingParams) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """The tokens that may be drawn and their probabilities, which add up to 1 at most. Temperature must be above 0.

    Temperature comes first, then top_k, top_p and min_p, each on what the one before left.
    """
    tokens = _candidates(logits, params)
    scaled = logits[tokens].astype(np.float64)
    weights = np.exp((scaled - scaled.max()) / params.temperature)
    probabilities = weights / weights.sum()
    if params.top_p < 1.0:
        before = probabilities.cumsum() - probabilities
        keep = max(1, int(np.count_nonzero(before < params.top_p)))
        tokens, probabilities = tokens[:keep], probabilities[:keep]
    if params.min_p > 0.0:
        likely = probabilities >= params.min_p * probabilities.max()
        tokens, probabilities = tokens[likely], probabilities[likely]
    return tokens, probabilities


def _candidates(logits: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.int64]:
    """What top_k leaves, by falling logit and equal ones by id; all ids, as they are, when no order is needed."""
    if 0 < params.top_k < len(logits):
        threshold = np.partition(logits, len(logits) - params.top_k)[len(logits) - params.top_k]
        best = np.flatnonzero(logits >= threshold)
        return best[np.argsort(-logits[best], kind="stable")][: params.top_k].astype(np.int64)
    if params.top_p < 1.0:
        return np.argsort(-logits, kind="stable").astype(np.int64)
    return np.arange(len(logits), dtype=np.int64)


def _uniform(seed: int, position: int) -> float:
    """A draw from [0, 1) that seed and position fix."""
    key = np.random.SeedSequence((seed & (2**64 - 1), position))
    return float(np.random.Generator(np.random.Philox(key)).random())
