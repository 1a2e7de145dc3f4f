"""How much is tried: a plan names lengths and cuts, so that a short run does what a long one does, only less of it."""

from collections.abc import Iterator
from dataclasses import dataclass

PAGE = 4
"""Tokens per page: windows of the tiny models are no multiple of it."""
TOLERANCE = 1e-5
"""How far logits may be apart, as a part of the largest, where their bits may differ."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`hits`: prefix lengths in tokens to resume at, full pages, ascending. `suffixes`: how many tokens follow those.

    `prompt` and `answer`: tokens of the questions asked. `chunkings`: tokens of the first chunks, the rest following
    one by one, or, where the last is 0, at once. `retracted`: how often a request is walked through with retractions,
    and `retracted_answer`: tokens of its answer.
    """

    hits: tuple[int, ...]
    suffixes: tuple[int, ...]
    prompt: int
    answer: int
    chunked: int
    chunkings: tuple[tuple[int, ...], ...]
    turns: int
    retracted: int
    retracted_answer: int

    def cuts(self, chunking: tuple[int, ...]) -> Iterator[int]:
        """Where the chunks of a chunking end."""
        stop = 0
        for tokens in chunking:
            stop = stop + tokens if tokens else self.chunked
            yield stop
        yield from range(stop + 1, self.chunked + 1)


SHORT = Plan(
    hits=(4, 12, 28),
    suffixes=(2, 13, 5),
    prompt=43,
    answer=8,
    chunked=34,
    chunkings=((13, 11), (5, 7, 20, 2, 0)),
    turns=2,
    retracted=1,
    retracted_answer=3,
)
FULL = Plan(
    hits=(4, 8, 12, 16, 20, 24, 40, 64),
    suffixes=(1, 13, 5, 2, 25),
    prompt=75,
    answer=20,
    chunked=61,
    chunkings=((), (13, 11), (1, 2, 3, 5, 8, 13), (5, 7, 20, 2, 0), (10, 10, 10, 10, 10, 0), (60, 0)),
    turns=4,
    retracted=6,
    retracted_answer=5,
)
