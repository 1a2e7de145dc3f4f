"""A row says where a prompt's pages came from and what that was worth; it is measured, never derived from another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hicache.units import Tier

COLD: Final = "cold"
CASES: Final = (COLD, *(tier.value for tier in Tier))
ENOUGH: Final = 0.95
"""The share of a prompt's full pages that has to come from the row's tier."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one prompt. `ttft_s`: seconds from submission to the first token."""

    prompt_tokens: int
    cached_tokens: Mapping[str, int]
    ttft_s: float
    token_ids: tuple[int, ...]
    text: str

    def to_json(self) -> dict[str, object]:
        """As plain values, to hand it from one process to another."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": dict(self.cached_tokens),
            "ttft_s": self.ttft_s,
            "token_ids": list(self.token_ids),
            "text": self.text,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Answer":
        """What `to_json` gave."""
        return cls(**{**values, "token_ids": tuple(values["token_ids"])})


@dataclass(frozen=True, slots=True)
class Row:
    """One case of the demo. `same_tokens`: the answer's tokens are those of the cold row."""

    case: str
    answer: Answer
    same_tokens: bool

    def to_json(self) -> dict[str, object]:
        return {
            "case": self.case,
            "prompt_tokens": self.answer.prompt_tokens,
            "cached_tokens": {tier.value: self.answer.cached_tokens[tier.value] for tier in Tier},
            "ttft_s": round(self.answer.ttft_s, 4),
            "same_tokens": self.same_tokens,
        }


def make_rows(answers: Mapping[str, Answer]) -> list[Row]:
    """One row per case, `answers` being by case."""
    cold = answers[COLD].token_ids
    return [Row(case, answers[case], answers[case].token_ids == cold) for case in CASES]


def shortfalls(rows: Sequence[Row], page_size: int) -> list[str]:
    """What the rows fail to show, a sentence each: pages that didn't come from the row's tier, or other tokens."""
    found = []
    for row in rows:
        full_tokens = row.answer.prompt_tokens // page_size * page_size
        if row.case == COLD and any(row.answer.cached_tokens.values()):
            found.append(f"the cold row is not cold: {dict(row.answer.cached_tokens)} tokens were cached")
        if row.case != COLD and row.answer.cached_tokens[row.case] < ENOUGH * full_tokens:
            found.append(f"{row.case}: {row.answer.cached_tokens[row.case]} of {full_tokens} tokens came from there")
        if not row.same_tokens:
            found.append(f"{row.case}: the answer's tokens differ from the cold one's")
    return found


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    head = f"{'':8} {'prompt':>8} {'from device':>12} {'from host':>10} {'from store':>11}"
    lines = [f"{head} {'first token':>12} {'speed-up':>9}  same tokens"]
    cold_s = rows[0].answer.ttft_s
    for row in rows:
        answer, cached = row.answer, row.answer.cached_tokens
        lines.append(
            f"{row.case:8} {answer.prompt_tokens:8} {cached['device']:12} {cached['host']:10} {cached['storage']:11}"
            f" {answer.ttft_s:10.3f} s {cold_s / answer.ttft_s:8.1f}x  {'yes' if row.same_tokens else 'NO'}"
        )
    return "\n".join(lines)
