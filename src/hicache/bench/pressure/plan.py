"""What is asked of an engine, and the ways in which it is short of memory: the requests are the same in all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

ENOUGH = "enough"
BACKUP = "backup"
RECOMPUTE = "recompute"
COPIES = "copies"
DROP = "drop"
SPILL = "spill"


@dataclass(frozen=True, slots=True)
class Setting:
    """How an engine is set up. `share`: device memory, as a part of what the running requests' tokens need.

    `host`: `much` is a quarter more than the device has, `little` has room for half a job and a store takes the rest,
    `none` keeps nothing of what leaves the device. `copied`: when pages get their host copies.
    """

    name: str
    meaning: str
    share: float
    preemption: Literal["retract", "recompute"]
    host: Literal["much", "little", "none"]
    copied: Literal["when computed", "when evicted"]


_QUARTER = 0.25
SETTINGS = (
    Setting(ENOUGH, "device memory for all running requests", 1.0, "retract", "much", "when computed"),
    Setting(BACKUP, "a quarter of it; who gives way is kept on the host", _QUARTER, "retract", "much", "when computed"),
    Setting(
        RECOMPUTE,
        "as backup, but who gives way goes on from what is cached",
        _QUARTER,
        "recompute",
        "much",
        "when computed",
    ),
    Setting(
        COPIES,
        "as recompute, with host copies made when pages are evicted",
        _QUARTER,
        "recompute",
        "much",
        "when evicted",
    ),
    Setting(DROP, "as recompute, without host memory", _QUARTER, "recompute", "none", "when computed"),
    Setting(
        SPILL, "as backup, with host memory for half a job and a store", _QUARTER, "retract", "little", "when computed"
    ),
)


@dataclass(frozen=True, slots=True)
class Load:
    """Long jobs, all there from the start, and bursts of questions that go before them.

    A job has a prompt of `shortest` to `longest` tokens of its own, and an answer of `answer`. In each of `bursts`
    bursts, `askers` ask a question about each of `contexts` contexts: `context` tokens the same in every burst,
    then `question` of their own; the reply has `reply`. A burst comes once the jobs have got `every` more tokens of
    their answers and the burst before has been answered. Everything runs greedily. `rounds`: how often each setting is
    run, in turn with the others.
    """

    jobs: int
    shortest: int
    longest: int
    answer: int
    bursts: int
    every: int
    contexts: int
    context: int
    askers: int
    question: int
    reply: int
    rounds: int
    page_size: int
    chunk_tokens: int

    def job_prompts(self, vocabulary: int) -> list[list[int]]:
        """The same ones every time; no two have a page in common."""
        random = np.random.default_rng(11)
        lengths = random.integers(self.shortest, self.longest + 1, self.jobs)
        return [_tokens(random, int(length), vocabulary) for length in lengths]

    def burst_prompts(self, vocabulary: int) -> Iterator[list[list[int]]]:
        """The questions of one burst after another, the same ones every time."""
        random = np.random.default_rng(12)
        contexts = [_tokens(random, self.context, vocabulary) for _ in range(self.contexts)]
        for _ in range(self.bursts):
            yield [
                context + _tokens(random, self.question, vocabulary) for _ in range(self.askers) for context in contexts
            ]

    def least_tokens(self, job_prompts: Sequence[Sequence[int]]) -> int:
        """What must be computed when nothing is computed twice: the last token of an answer never is."""
        jobs = sum(len(prompt) + self.answer - 1 for prompt in job_prompts)
        questions = self.bursts * self.questions * (self.question + self.reply - 1)
        return jobs + self.contexts * self.context + questions

    @property
    def questions(self) -> int:
        """Questions in a burst."""
        return self.contexts * self.askers

    @property
    def requests(self) -> int:
        """Jobs and questions."""
        return self.jobs + self.bursts * self.questions

    @property
    def running(self) -> int:
        """How many requests there are at once at most."""
        return self.jobs + self.questions

    @property
    def longest_request(self) -> int:
        """Tokens of prompt and answer of the longest request there can be."""
        return max(self.longest + self.answer, self.context + self.question + self.reply)

    @property
    def longest_pages(self) -> int:
        """Pages of the longest request there can be at its end."""
        return self._pages(self.longest_request)

    @property
    def burst_pages(self) -> int:
        """Pages of a burst at its end."""
        return self.contexts * self._pages(self.context) + self.questions * (
            self._pages(self.question + self.reply) + 1
        )

    def device_pages(self, setting: Setting) -> int:
        """Pages on the device: at least those of the longest request, which has to run.

        With memory for all that runs there is more, so that contexts stay too.
        """
        job = self._pages((self.shortest + self.longest) // 2 + self.answer)
        running = self.jobs * job + self.burst_pages
        if setting.share >= 1:
            return self.jobs * self.longest_pages + self.bursts * self.burst_pages
        return max(self.longest_pages + 1, int(setting.share * running))

    def host_pages(self, setting: Setting) -> int:
        """Pages on the host."""
        much = 5 * self.device_pages(setting) // 4
        return {"much": much, "little": self.longest_pages // 2, "none": 1}[setting.host]

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def _tokens(random: np.random.Generator, count: int, vocabulary: int) -> list[int]:
    tokens: list[int] = random.integers(3, vocabulary - 1, count).tolist()
    return tokens
