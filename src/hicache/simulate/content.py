"""What every byte must be: a token's state is a function of the tokens up to it, its pool and its layer, nothing else.

All arithmetic is that of unsigned 64-bit integers, and wraps. A prefix has a hash, the sum of one random number per
position and token; a slot holds, per token and layer, an invertible function of the hash of the prefix that ends there.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from hicache.units import PoolName

WordArray: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]

VOCABULARY = 64
_MASK = (1 << 64) - 1
_OWN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Random numbers: `words` [positions, VOCABULARY] for tokens, `weights` [positions] for what is read there."""

    words: WordArray
    weights: WordArray
    weight_sums: WordArray

    def step(self, before: int, position: int, token: int) -> int:
        """The hash of a prefix that is one token longer than one with hash `before`."""
        return (before + int(self.words[position, token])) & _MASK

    def hashes(self, before: int, start: int, tokens: Sequence[int] | np.ndarray[Any, Any]) -> WordArray:
        """Hashes of the prefixes that end at positions `start`, `start + 1`, ...; `before` is that of what precedes."""
        words = self.words[np.arange(start, start + len(tokens)), tokens]
        sums: WordArray = np.cumsum(words, dtype=np.uint64)
        sums += np.uint64(before)
        return sums


@cache
def alphabet(positions: int) -> Alphabet:
    """The same for the same number of positions."""
    random = np.random.Generator(np.random.PCG64(20_250_101))
    words = random.integers(0, 1 << 63, (positions, VOCABULARY), np.uint64) | np.uint64(1)
    weights = random.integers(0, 1 << 63, positions, np.uint64) * np.uint64(2) + np.uint64(1)
    return Alphabet(words, weights, np.concatenate(([np.uint64(0)], np.cumsum(weights, dtype=np.uint64))))


@dataclass(frozen=True, slots=True)
class Code:
    """How a pool writes hashes, per layer: `scale * hash + shift`. What is read of all layers is summed by `votes`."""

    scale: WordArray
    shift: WordArray
    votes: WordArray
    inverse: int
    """Of the first layer's scale."""

    @property
    def sums(self) -> tuple[int, int]:
        """What a hash and a one come to when all layers are summed."""
        return int((self.scale * self.votes).sum(dtype=np.uint64)), int((self.shift * self.votes).sum(dtype=np.uint64))

    def encode(self, hashes: WordArray) -> WordArray:
        """What is written of each hash: [len(hashes), layers]."""
        words: WordArray = hashes[:, None] * self.scale + self.shift
        return words

    def decode(self, word: int) -> int:
        """The hash that a word of the first layer stands for."""
        return ((word - int(self.shift[0])) * self.inverse) & _MASK


@cache
def code(pool: PoolName, layers: int) -> Code:
    """The same for the same pool."""
    seed = int.from_bytes(hashlib.sha256(pool.encode()).digest()[:8], "little")
    random = np.random.Generator(np.random.PCG64(seed))
    drawn = random.integers(0, 1 << 62, (3, layers), np.uint64) * np.uint64(2) + np.uint64(1)
    return Code(drawn[0], drawn[1], drawn[2], pow(int(drawn[0][0]), -1, 1 << 64))


@dataclass(frozen=True, slots=True)
class Sight:
    """A pool that is read when a token is computed: which tokens it sees (None: all), and its layers."""

    pool: PoolName
    layers: int
    window: int | None = None

    def first(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def own_part(hashed: int) -> int:
    """What a token adds to its own digest."""
    return (hashed * _OWN) & _MASK


def chosen(digest: int) -> int:
    """The token that follows when what was read has this digest."""
    mixed = (digest ^ (digest >> 31)) * _MIX & _MASK
    return (mixed >> 40) % VOCABULARY
