"""One line per store and page size, for people."""

from collections.abc import Mapping
from typing import Any

_COLUMNS = (
    ("put GB/s", "put_gb_s"),
    ("get warm", "get_warm_gb_s"),
    ("get cold", "get_cold_gb_s"),
    ("put of plain", "put_of_plain"),
    ("warm of plain", "get_warm_of_plain"),
    ("cold of plain", "get_cold_of_plain"),
    ("put CPU s/GB", "put_cpu_s_per_gb"),
    ("get CPU s/GB", "get_warm_cpu_s_per_gb"),
    ("us/exists", "exists_us"),
)


def table(report: Mapping[str, Any]) -> str:
    """The rows of a report as text."""
    names = [row["store"] for row in report["rows"]]
    width = max(map(len, names), default=0)
    lines = [" ".join([f"{'store':{width}}", f"{'page KiB':>8}", *(f"{title:>13}" for title, _ in _COLUMNS)])]
    for row in report["rows"]:
        cells = [f"{'-' if row[key] is None else format(row[key], '.2f'):>13}" for _, key in _COLUMNS]
        lines.append(" ".join([f"{row['store']:{width}}", f"{row['page_bytes'] / 1024:8g}", *cells]))
    return "\n".join(lines)
