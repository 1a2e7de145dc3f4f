"""What each backend promises beyond the protocol: the suites hold it to this, the table in the docs is made of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Promises:
    """One row of the table."""

    outlives_close: bool
    shared: bool
    straight: bool
    outlives_kill: bool
    when_full: str
    time_limit: str
    lists: bool = False


PROMISES = {
    "file": Promises(True, True, True, True, "drops tails of the chains that rested longest", "none", lists=True),
    "memory": Promises(False, False, False, False, "drops tails of the chains that rested longest", "none", lists=True),
    "valkey": Promises(True, True, True, False, "the server's policy", "`timeout`"),
    "s3": Promises(True, True, False, True, "nothing is dropped", "`timeout`"),
    "mooncake": Promises(
        True, True, True, False, "the master drops what rested longest", "`timeout`, then the engine's"
    ),
    "nixl-posix": Promises(True, True, True, True, "nothing is dropped", "none"),
}

HEADINGS = (
    "store",
    "outlives `close`",
    "shared by processes",
    "no copy on the way",
    "outlives kill -9",
    "when it is full",
    "time limit of a call",
    "`hicache store`",
)


def table() -> list[str]:
    """The table as lines of Markdown."""
    rows = [HEADINGS, ("---",) * len(HEADINGS)]
    for name, row in PROMISES.items():
        flags = (row.outlives_close, row.shared, row.straight, row.outlives_kill)
        rows.append((f"`{name}`", *map(_yes, flags), row.when_full, row.time_limit, _yes(row.lists)))
    return ["| " + " | ".join(row) + " |" for row in rows]


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
