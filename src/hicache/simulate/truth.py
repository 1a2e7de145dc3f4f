"""What the model would do alone, known before it is asked: every answer, and the digest of everything it must read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hicache.simulate.content import Alphabet, Sight, WordArray, chosen, code, own_part
from hicache.units import PoolName

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt with its answer: tokens, the hash of every prefix, and the digest of what its last token reads."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    hashes: WordArray
    digests: tuple[int, ...]

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_tokens :]


class Truth:
    """Answers of a model whose tokens see `sights`; and, by hash, the digests that any step must come to."""

    def __init__(self, alphabet: Alphabet, sights: Sequence[Sight]) -> None:
        self._alphabet = alphabet
        self._sights = tuple(sights)
        self._sums = tuple(code(sight.pool, sight.layers).sums for sight in sights)
        self._next: dict[int, int] = {}
        self._digests: dict[int, int] = {}
        self._known: dict[int, Known] = {}

    def tell(self, prompt: Sequence[int], answer_tokens: int) -> Known:
        """The prompt and `answer_tokens` tokens of answer. From now on its prefixes are known."""
        tokens = list(prompt)
        hashes = self._alphabet.hashes(0, 0, np.array(tokens))
        weights, ones = self._alphabet.weights, self._alphabet.weight_sums
        sums = [0, *np.cumsum(hashes * weights[: len(hashes)], dtype=np.uint64).tolist()]
        known = hashes.tolist()
        digests: list[int] = []
        position = 0
        while True:
            if position == len(known):
                if len(tokens) == len(prompt) + answer_tokens:
                    break
                tokens.append(chosen(digests[-1]))
                known.append(self._alphabet.step(known[-1], position, tokens[-1]))
                sums.append((sums[-1] + known[-1] * int(weights[position])) & _MASK)
            digests.append(self._digest(position, known[position], sums, ones))
            position += 1
        self._digests.update(zip(known, digests, strict=True))
        self._next.update(zip(known, [chosen(digest) for digest in digests], strict=True))
        result = Known(tuple(tokens), len(prompt), np.array(known, np.uint64), tuple(digests))
        self._known[known[-1]] = result
        return result

    def digest(self, hashed: int) -> int | None:
        """What a token reads at the end of the prefix with this hash; None if no request has such a prefix."""
        return self._digests.get(hashed)

    def next(self, hashed: int) -> int | None:
        """The token that follows the prefix with this hash; None if no request has such a prefix."""
        return self._next.get(hashed)

    def find(self, hashed: int) -> Known | None:
        """Some request that has the prefix with this hash. Slow: for messages."""
        return next((one for one in self._known.values() if (one.hashes == np.uint64(hashed)).any()), None)

    def _digest(self, position: int, hashed: int, sums: Sequence[int], ones: WordArray) -> int:
        digest = own_part(hashed)
        for sight, (scale, shift) in zip(self._sights, self._sums, strict=True):
            first = sight.first(position)
            digest += scale * (sums[position + 1] - sums[first])
            digest += shift * (int(ones[position + 1]) - int(ones[first]))
        return digest & _MASK


def wrong_pools(found: dict[PoolName, WordArray], known: Known, first: int) -> list[str]:
    """Which pools, and at which position first, hold something else than they must. `found`: [tokens, layers] each.

    The rows of `found` are positions `first`, `first + 1`, ...
    """
    wrong = []
    for pool, words in found.items():
        expected = code(pool, words.shape[1]).encode(known.hashes[first : first + len(words)])
        bad = np.flatnonzero((words[: len(expected)] != expected).any(1))
        if len(bad):
            wrong.append(f"pool {pool!r} from position {first + int(bad[0])} on, {len(bad)} tokens")
    return wrong
