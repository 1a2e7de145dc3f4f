"""The flags of `hicache bench storage`, and what it prints."""

import argparse
import json
from pathlib import Path

from hicache.config.sizes import parse_size
from hicache.errors import ConfigError


def add_bench_storage(parts: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the part to the parser of `hicache bench`."""
    parser = parts.add_parser("storage", help="pages to stores and back, next to plain I/O", allow_abbrev=False)
    parser.add_argument(
        "--url", action="append", default=[], help="a store, may be given again (default: a new file store in FOLDER)"
    )
    parser.add_argument(
        "--page-size",
        action="append",
        default=[],
        metavar="SIZE",
        help="bytes of a page, may be given again (default: 128KiB, 512KiB, 1MiB and 4MiB)",
    )
    parser.add_argument(
        "--total", default="256MiB", metavar="SIZE", help="bytes per page size, store and round (default: 256MiB)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="medians are taken over so many (default: 5)")
    parser.add_argument("--batch", type=int, default=16, metavar="PAGES", help="pages per call (default: 16)")
    parser.add_argument("--threads", type=int, default=1, help="threads that call (default: 1)")
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where the plain file goes, for a time (default: the current one)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(command=_bench_storage)


def _bench_storage(arguments: argparse.Namespace) -> int:
    from hicache.bench.storage import PAGE_SIZES, Options, run, table

    sizes = tuple(_size("--page-size", text) for text in arguments.page_size)
    options = Options(
        urls=tuple(arguments.url),
        page_bytes=sizes or PAGE_SIZES,
        total_bytes=_size("--total", arguments.total),
        rounds=arguments.rounds,
        batch_pages=arguments.batch,
        threads=arguments.threads,
        folder=arguments.folder,
    )
    report = run(options)
    print(json.dumps(report) if arguments.json else table(report))
    return 0


def _size(flag: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{flag}={text}: {error}") from error
