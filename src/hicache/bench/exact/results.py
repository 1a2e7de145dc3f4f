"""What was found, as frozen values: a check has passed, failed, or does not apply, and says what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Numbers = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried. `passed` is None where there is nothing to try; `measured` is a few characters long.

    `failures` say in a sentence each what was wrong.
    """

    name: str
    passed: bool | None
    measured: str
    numbers: Numbers = field(default_factory=dict)
    failures: tuple[str, ...] = ()

    @classmethod
    def judged(cls, name: str, measured: str, failures: Sequence[str], **numbers: float | int | str) -> "Check":
        """Passed if there are no failures."""
        return cls(name, not failures, measured, numbers, tuple(failures))

    @property
    def cell(self) -> str:
        """For a table."""
        if self.passed is None:
            return f"-  {self.measured}"
        return f"{'ok' if self.passed else 'FAIL'} {self.measured}"

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"passed": self.passed, **self.numbers, "failures": list(self.failures)}


@dataclass(frozen=True, slots=True)
class PoolBytes:
    """What a pool costs: bytes per slot, and how many tokens a slot holds (0: it is a snapshot of state)."""

    name: str
    slot_bytes: int
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        if self.tokens:
            return {"pool": self.name, "bytes_per_token": self.slot_bytes / self.tokens}
        return {"pool": self.name, "bytes_per_state": self.slot_bytes}


@dataclass(frozen=True, slots=True)
class Row:
    """One family."""

    family: str
    pools: tuple[PoolBytes, ...]
    checks: tuple[Check, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing has failed."""
        return all(check.passed is not False for check in self.checks)

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token over all pools."""
        return sum(pool.slot_bytes / pool.tokens for pool in self.pools if pool.tokens)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one snapshot over all pools."""
        return sum(pool.slot_bytes for pool in self.pools if not pool.tokens)

    def check(self, name: str) -> Check:
        """The check of that name."""
        return next(check for check in self.checks if check.name == name)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "family": self.family,
            "passed": self.passed,
            "seconds": round(self.seconds, 2),
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_state": self.bytes_per_state,
            "pools": [pool.to_json() for pool in self.pools],
            "checks": {check.name: check.to_json() for check in self.checks},
        }


@dataclass(frozen=True, slots=True)
class Refusal:
    """A family that is not run: what the user is told, and what was measured without the refusal."""

    family: str
    passed: bool
    text: str
    measured: str

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"family": self.family, "passed": self.passed, "refusal": self.text, "measured": self.measured}


@dataclass(frozen=True, slots=True)
class Report:
    """All rows."""

    rows: tuple[Row, ...]
    refusals: tuple[Refusal, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing has failed."""
        return all(row.passed for row in self.rows) and all(refusal.passed for refusal in self.refusals)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "passed": self.passed,
            "rows": [row.to_json() for row in self.rows],
            "refusals": [refusal.to_json() for refusal in self.refusals],
        }


def table(report: Report) -> str:
    """For people: a row per family, then what has failed, then who is refused and why."""
    names = [check.name for check in report.rows[0].checks] if report.rows else []
    cells = [["family", "pools", "B/token", "B/state", *names]] if names else []
    for row in report.rows:
        pools = " ".join(pool.name for pool in row.pools)
        sizes = [_amount(row.bytes_per_token), _amount(row.bytes_per_state)]
        cells.append([row.family, pools, *sizes, *(check.cell for check in row.checks)])
    widths = [max(len(line[column]) for line in cells) for column in range(len(names) + 4)] if cells else []
    lines = [_line(line, widths) for line in cells]
    for row in report.rows:
        lines += [f"{row.family}, {check.name}: {text}" for check in row.checks for text in check.failures]
    if report.refusals:
        lines.append("\nnot run:" if lines else "not run:")
    for refusal in report.refusals:
        lines += [f"{refusal.family}: {refusal.text}", f"    {'ok' if refusal.passed else 'FAIL'} {refusal.measured}"]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    sized = [
        cell.rjust(width) if column in (2, 3) else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(sized).rstrip()


def _amount(nbytes: float) -> str:
    return f"{nbytes:,.0f}" if nbytes else "-"
