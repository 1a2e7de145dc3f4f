"""Which pages of a prefix a pool must hold to resume there; the usable hit is what every pool covers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from hicache.errors import ConfigError
from hicache.units import BoolArray, PageRange


@dataclass(frozen=True, slots=True)
class Full:
    """Every page: attention over the whole prefix."""

    def required(self, pages: int, page_size: int) -> PageRange:
        """The pages that must be present to resume after `pages` pages of `page_size` tokens."""
        return PageRange(0, pages)

    def resumable(self, present: BoolArray, page_size: int) -> BoolArray:
        """For n = 0..len(present): whether a prefix of n pages can be resumed. Shape [pages + 1], bool."""
        return np.concatenate(([True], np.logical_and.accumulate(present)))


@dataclass(frozen=True, slots=True)
class Window:
    """The pages that the next token's window reaches: itself and the `tokens - 1` tokens before it."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(
                f"a window of {self.tokens} tokens; the next token sees at least itself, so give 1 or more"
            )

    def pages(self, page_size: int) -> int:
        """How many pages at the end of a prefix the next token can see."""
        return -(-(self.tokens - 1) // page_size)

    def required(self, pages: int, page_size: int) -> PageRange:
        """The pages that must be present to resume after `pages` pages of `page_size` tokens."""
        return PageRange(max(0, pages - self.pages(page_size)), pages)

    def resumable(self, present: BoolArray, page_size: int) -> BoolArray:
        """For n = 0..len(present): whether a prefix of n pages can be resumed. Shape [pages + 1], bool."""
        boundaries = np.arange(len(present) + 1)
        holes_before = np.concatenate(([0], np.cumsum(~present)))
        start = np.maximum(0, boundaries - self.pages(page_size))
        return np.asarray(holes_before == holes_before[start])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The snapshot at the boundary: page n - 1 of the pool is the state after n pages."""

    def required(self, pages: int, page_size: int) -> PageRange:
        """The pages that must be present to resume after `pages` pages of `page_size` tokens."""
        return PageRange(max(0, pages - 1), pages)

    def resumable(self, present: BoolArray, page_size: int) -> BoolArray:
        """For n = 0..len(present): whether a prefix of n pages can be resumed. Shape [pages + 1], bool."""
        return np.concatenate(([True], present))


Coverage: TypeAlias = Full | Window | Checkpoint


def longest_usable(pools: Iterable[tuple[Coverage, BoolArray]], page_size: int) -> int:
    """The most pages at which every pool can resume, given which pages each holds (all of one length)."""
    usable: BoolArray | None = None
    for coverage, present in pools:
        resumable = coverage.resumable(present, page_size)
        usable = resumable if usable is None else usable & resumable
    if usable is None:
        return 0
    return int(np.flatnonzero(usable)[-1])
