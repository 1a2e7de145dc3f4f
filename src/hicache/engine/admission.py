"""A request starts only where every pool has room for it and for the growth of what runs: numbers decide, no model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hicache.coverage import Coverage, Full, Window
from hicache.units import PoolName

HEADROOM_TOKENS = 32
"""How many tokens ahead a request's growth counts, so that what is let in need not give way at once."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request takes in its next steps: it has slots for `held_pages` pages.

    Its `now_tokens` tokens are computed in chunks, and then one by one until there are `soon_tokens`. `windows`: the
    pages that its windows see are among those that it lacks. `states`: slots that it lacks in every pool of recurrent
    state.
    """

    held_pages: int
    now_tokens: int
    soon_tokens: int
    windows: bool = False
    states: int = 0


class Budget:
    """Turns claims into slots, by what each pool covers. A step computes up to `chunk_tokens` tokens of a prompt."""

    def __init__(self, coverages: Mapping[PoolName, Coverage], page_size: int, chunk_tokens: int) -> None:
        self._coverages = dict(coverages)
        self._page_size = page_size
        self._chunk_pages = -(-(page_size - 1 + chunk_tokens) // page_size)

    def slots(self, claim: Claim) -> dict[PoolName, int]:
        """The slots that a claim takes, at most."""
        return {pool: self._slots(coverage, claim) for pool, coverage in self._coverages.items()}

    def admits(self, room: Mapping[PoolName, int], new: Claim, others: Iterable[Claim]) -> bool:
        """Whether `room`, per pool, is enough for a new request beside what others will take."""
        left = dict(room)
        for claim in (new, *others):
            for pool, count in self.slots(claim).items():
                left[pool] -= count
        return min(left.values()) >= 0

    def freed(self, room: Mapping[PoolName, int], pages: Iterable[int]) -> dict[PoolName, int]:
        """The room that there may be at most once requests that hold so many pages are gone; pages may be shared."""
        more = dict(room)
        for count in pages:
            for pool, slots in self.slots(self._all(count)).items():
                more[pool] += slots
        return more

    def _all(self, pages: int) -> Claim:
        tokens = pages * self._page_size
        return Claim(0, tokens, tokens, windows=True, states=1)

    def _slots(self, coverage: Coverage, claim: Claim) -> int:
        if isinstance(coverage, Full):
            return self._pages(claim, claim.soon_tokens)
        if isinstance(coverage, Window):
            seen = coverage.pages(self._page_size) if claim.windows else 0
            now = min(self._pages(claim, claim.now_tokens), seen + self._chunk_pages)
            return max(now, min(self._pages(claim, claim.soon_tokens), seen + 1))
        return claim.states

    def _pages(self, claim: Claim, tokens: int) -> int:
        return max(0, -(-tokens // self._page_size) - claim.held_pages)
