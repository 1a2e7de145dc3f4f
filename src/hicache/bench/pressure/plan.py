"""What is asked of an engine, and the ways in which it is short of memory: the requests are the same in all of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

ENOUGH = "enough"
BACKUP = "backup"
RECOMPUTE = "recompute"
DROP = "drop"
SPILL = "spill"


@dataclass(frozen=True, slots=True)
class Setting:
    """How an engine is set up. `share`: device memory, as a part of what the running requests' tokens need.

    `host`: `much` has room for the running requests, `little` for about half of one, and a store takes the rest;
    `none` keeps nothing of what leaves the device.
    """

    name: str
    meaning: str
    share: float
    preemption: Literal["retract", "recompute"]
    host: Literal["much", "little", "none"]


_QUARTER = 0.25
SETTINGS = (
    Setting(ENOUGH, "device memory for all running requests", 1.0, "retract", "much"),
    Setting(BACKUP, "a quarter of it; who gives way is kept on the host", _QUARTER, "retract", "much"),
    Setting(RECOMPUTE, "a quarter; who gives way is computed again, from host pages on", _QUARTER, "recompute", "much"),
    Setting(DROP, "a quarter and no host memory; who gives way is computed again", _QUARTER, "recompute", "none"),
    Setting(SPILL, "a quarter, host memory for half a request, and a store behind it", _QUARTER, "retract", "little"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests. Prompts have from `shortest` to `longest` tokens, no two with a page in common; all run greedily.

    `running` of them at once at most; `rounds`: how often each setting is run, in turn with the others.
    """

    requests: int
    running: int
    shortest: int
    longest: int
    answer: int
    rounds: int
    page_size: int
    chunk_tokens: int

    def prompts(self, vocabulary: int) -> Iterator[list[int]]:
        """The same ones every time."""
        random = np.random.default_rng(11)
        for length in random.integers(self.shortest, self.longest + 1, self.requests):
            yield random.integers(3, vocabulary - 1, int(length)).tolist()

    @property
    def request_pages(self) -> int:
        """Pages of a request of mean length at its end."""
        return -(-((self.shortest + self.longest) // 2 + self.answer) // self.page_size)

    @property
    def longest_pages(self) -> int:
        """Pages of the longest request there can be at its end."""
        return -(-(self.longest + self.answer) // self.page_size)

    def device_pages(self, setting: Setting) -> int:
        """Pages on the device: at least those of the longest request, which has to run."""
        return max(self.longest_pages + 1, int(setting.share * self.running * self.request_pages))

    def host_pages(self, setting: Setting) -> int:
        """Pages on the host."""
        return {"much": self.running * self.longest_pages, "little": self.request_pages // 2, "none": 1}[setting.host]
