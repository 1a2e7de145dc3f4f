"""Figures are medians over rounds; in each round every store and the plain file take their turn, so that all meet

the same weather. Shares of the plain file's speed are medians of what was measured in the same round.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np

from hicache.bench.storage.subjects import Pages, Subject, opened_raw, opened_store
from hicache.errors import ConfigError, StorageError

RAW = "plain file"

PHASES = ("put", "get_warm", "get_cold")

PAGE_SIZES = (128 << 10, 512 << 10, 1 << 20, 4 << 20)

_SECRET = re.compile(r"//[^@/]*@")


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure: `urls` (none: a file store of its own in `folder`), each with every page size.

    `total_bytes` go through each store and back per page size and round, `batch_pages` per call, from `threads`
    threads. The plain file lies in `folder`.
    """

    urls: tuple[str, ...] = ()
    page_bytes: tuple[int, ...] = PAGE_SIZES
    total_bytes: int = 256 << 20
    rounds: int = 5
    batch_pages: int = 16
    threads: int = 1
    folder: Path = Path()

    def check(self) -> None:
        """ConfigError if nothing sensible can be measured."""
        least = {"rounds": self.rounds, "batch": self.batch_pages, "threads": self.threads}
        for name, value in least.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}: at least 1")
        for size in self.page_bytes:
            if not 0 < size <= self.total_bytes:
                raise ConfigError(f"pages of {size} bytes do not fit into {self.total_bytes}: give a larger total")
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is not a folder")


@dataclass(frozen=True, slots=True)
class Measured:
    """Wall and CPU seconds (of this process) of one phase."""

    wall_s: float
    cpu_s: float


Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""uint8, shape [pages, page bytes]."""

Round: TypeAlias = dict[str, Measured]
"""By phase: put, get_warm, get_cold (missing where files can't be dropped from the page cache), exists."""

Open: TypeAlias = Callable[[], AbstractContextManager[Subject]]


def run(options: Options) -> dict[str, Any]:
    """Measures, and says what was measured. Bytes are payload bytes, GB are 10^9 bytes.

    Raises ConfigError for options that can't be measured, StorageError for a store that refuses or loses pages.
    """
    options.check()
    with TemporaryDirectory(prefix="hicache-bench-", dir=options.folder) as scratch:
        urls = options.urls or (f"file:{scratch}/store",)
        rows = [row for size in options.page_bytes for row in _run_size(options, urls, Path(scratch), size)]
    return {
        "total_bytes": options.total_bytes,
        "rounds": options.rounds,
        "batch_pages": options.batch_pages,
        "threads": options.threads,
        "rows": rows,
    }


def _run_size(options: Options, urls: Sequence[str], scratch: Path, page_bytes: int) -> Iterator[dict[str, Any]]:
    count = options.total_bytes // page_bytes
    source = np.random.default_rng(0).integers(0, 256, (count, page_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    subjects: dict[str, Open] = {url: partial(opened_store, url, count) for url in urls}
    subjects[RAW] = partial(opened_raw, scratch, page_bytes, count)
    rounds: dict[str, list[Round]] = {name: [] for name in subjects}
    order = list(subjects)
    for _ in range(options.rounds):
        for name in order:
            target[:] = 0
            with subjects[name]() as subject:
                rounds[name].append(_run_round(subject, options, source, target))
        order.reverse()
    for name, its in rounds.items():
        yield {
            "store": _SECRET.sub("//...@", name),
            "page_bytes": page_bytes,
            **_figures(its, count * page_bytes, count),
            **_shares(its, rounds[RAW]),
        }


def _run_round(subject: Subject, options: Options, source: Bytes, target: Bytes) -> Round:
    given, taken = [row.data for row in source], [row.data for row in target]
    measured = {
        "put": _timed(lambda: _in_batches(subject.put, given, options)),
        "get_warm": _timed(lambda: _in_batches(subject.get, taken, options)),
        "exists": _timed(lambda: subject.look_up(len(given))),
    }
    if not np.array_equal(source, target):
        raise StorageError("what came back is not what was put")
    if files := subject.files():
        _drop(files)
        measured["get_cold"] = _timed(lambda: _in_batches(subject.get, taken, options))
    return measured


def _in_batches(call: Callable[[int, Pages], None], pages: Pages, options: Options) -> None:
    size = options.batch_pages
    starts = range(0, len(pages), size)
    if options.threads == 1:
        for start in starts:
            call(start, pages[start : start + size])
        return
    with ThreadPoolExecutor(options.threads) as threads:
        for ended in [threads.submit(call, start, pages[start : start + size]) for start in starts]:
            ended.result()


def _timed(work: Callable[[], None]) -> Measured:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Measured(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def _drop(files: Sequence[Path]) -> None:
    """Puts the files on the disk and out of the page cache."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _figures(rounds: Sequence[Round], size_bytes: int, count: int) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    for phase in PHASES:
        its = [one[phase] for one in rounds if phase in one]
        figures[f"{phase}_gb_s"] = _median([size_bytes / 1e9 / one.wall_s for one in its])
        figures[f"{phase}_cpu_s_per_gb"] = _median([one.cpu_s * 1e9 / size_bytes for one in its])
    figures["exists_us"] = _median([one["exists"].wall_s * 1e6 / count for one in rounds])
    return figures


def _shares(rounds: Sequence[Round], raw: Sequence[Round]) -> dict[str, float | None]:
    """Of the plain file's speed and CPU time, in the same round."""
    shares: dict[str, float | None] = {}
    for phase in PHASES:
        pairs = [(its[phase], plain[phase]) for its, plain in zip(rounds, raw, strict=True) if phase in its]
        shares[f"{phase}_of_plain"] = _median([plain.wall_s / its.wall_s for its, plain in pairs])
        shares[f"{phase}_cpu_of_plain"] = _median([its.cpu_s / plain.cpu_s for its, plain in pairs])
    return shares


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 3) if values else None
