"""`hicache store` looks at a store and cleans it up, whoever else uses it meanwhile; what it does is in storage."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

from hicache.config.sizes import parse_size
from hicache.errors import ConfigError
from hicache.storage.inventory import NamespaceSummary, find_namespace, summarise, tidy, verify
from hicache.storage.listing import ListsValues, require_listing
from hicache.storage.protocol import Cleared
from hicache.storage.registry import open_store, parse_location


@contextmanager
def opened(url: str) -> Iterator[ListsValues]:
    """A store that is there already. ConfigError for one that isn't, or that can't list what it holds."""
    location = parse_location(url, {})
    if location.scheme == "file" and not Path(location.path).expanduser().is_dir():
        raise ConfigError(f"there is no store in {location.path}")
    with closing(open_store(url)) as backend:
        yield require_listing(location.scheme, backend)


@contextmanager
def bar(total: int, unit: str, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """What to tell of progress: a bar on stderr if that is a terminal and tqdm is installed."""
    if not shown or not sys.stderr.isatty():
        yield lambda done: None
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda done: None
        return
    with tqdm(total=total, unit=unit, file=sys.stderr) as line:
        yield line.update


def ls(arguments: argparse.Namespace) -> int:
    """Prints a row per namespace."""
    with opened(arguments.url) as store:
        summary = summarise(store)
    if arguments.json:
        print(json.dumps({"namespaces": [_row(one) for one in summary.namespaces]}))
        return 0
    print(f"{'NAMESPACE':16}  {'PAGES':>9}  {'SIZE':>10}  {'LAST USE':19}  MODEL")
    for one in summary.namespaces:
        print(f"{_short(one):16}  {one.pages:>9}  {_size(one.size_bytes):>10}  {_when(one.used_s)}  {_model(one)}")
    return 0


def stat(arguments: argparse.Namespace) -> int:
    """Prints totals."""
    with opened(arguments.url) as store:
        summary = summarise(store)
    values = {
        "namespaces": len(summary.namespaces),
        "pages": summary.pages,
        "bytes": summary.size_bytes,
        "taken_bytes": summary.taken_bytes,
        "private_pages": summary.private.pages,
        "private_bytes": summary.private.size_bytes,
        "problems": list(summary.problems),
    }
    _show(values, arguments.json)
    return 0


def verify_all(arguments: argparse.Namespace) -> int:
    """Reads every page. Status 1 if something is damaged and was left, or could not be read."""
    with opened(arguments.url) as store:
        values = store.values()
        with bar(len(values), "page", shown=not arguments.json) as progress:
            found = verify(store, values, repair=arguments.repair, progress=progress)
    shown = {
        "good_pages": found.good_pages,
        "good_bytes": found.good_bytes,
        "damaged_pages": found.damaged_pages,
        "reasons": found.damaged,
        "removed_pages": found.removed.pages,
        "unread_pages": found.unread_pages,
        "gone_pages": found.gone_pages,
    }
    _show(shown, arguments.json)
    return 1 if found.unread_pages or (found.damaged_pages and not arguments.repair) else 0


def gc(arguments: argparse.Namespace) -> int:
    """Removes what is of no use, then the oldest down to `--size`."""
    size_bytes = None if arguments.size is None else _parse_size(arguments.size)
    with opened(arguments.url) as store:
        done = tidy(store, size_bytes, time.time_ns())
        taken_bytes = store.taken_bytes()
    shown = {
        "reclaimed": done.reclaimed,
        "unreachable_pages": done.unreachable.pages,
        "unreachable_bytes": done.unreachable.size_bytes,
        "dropped_pages": done.trimmed.pages,
        "dropped_bytes": done.trimmed.size_bytes,
        "taken_bytes": taken_bytes,
    }
    _show(shown, arguments.json)
    return 0


def rm(arguments: argparse.Namespace) -> int:
    """Removes a namespace. Status 1 if the user said no, or a part of it is left."""
    with opened(arguments.url) as store:
        one = find_namespace(summarise(store), arguments.namespace)
        if not arguments.yes and not _agrees(one):
            print("nothing was removed", file=sys.stderr)
            return 1
        removed = store.clear(one.fingerprint)
    _show(_cleared(removed), arguments.json)
    return 1 if removed.left_pages else 0


def _agrees(one: NamespaceSummary) -> bool:
    print(
        f"remove {one.pages} pages ({_size(one.size_bytes)}) of {_model(one)}, namespace {_short(one)}? [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _row(one: NamespaceSummary) -> dict[str, object]:
    what = one.description
    described: dict[str, object] = {}
    if what is not None:
        described = {**asdict(what), "pools": [pool.name for pool in what.pools]}
    return {
        "namespace": one.fingerprint.hex(),
        "pages": one.pages,
        "bytes": one.size_bytes,
        "used_s": one.used_s,
        **described,
    }


def _cleared(cleared: Cleared) -> dict[str, object]:
    return {
        "removed_pages": cleared.pages,
        "removed_bytes": cleared.size_bytes,
        "left_pages": cleared.left_pages,
    }


def _show(values: Mapping[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        label = name.replace("_", " ")
        print(f"{label}: {_readable(name, value)}")


def _readable(name: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {reason}" for reason, count in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(value) or "none"
    return _size(value) if name.endswith("bytes") and isinstance(value, int) else str(value)


def _model(one: NamespaceSummary) -> str:
    what = one.description
    if what is None:
        return "(unknown)"
    extras = [what.dtype, f"page {what.page_size}"]
    extras += [f"shard {what.shard}"] if what.shard != "0/1" else []
    extras += [f"adapter {what.adapter[:12]}"] if what.adapter else []
    extras += [f"tenant {what.tenant}"] if what.tenant else []
    extras += ["salted"] if what.salted else []
    return f"{what.model} ({', '.join(extras)})"


def _short(one: NamespaceSummary) -> str:
    return one.fingerprint.hex()[:16] or "?"


def _size(nbytes: int) -> str:
    """Rounded to three digits, for people."""
    for unit, unit_bytes in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= unit_bytes:
            return f"{nbytes / unit_bytes:.3g} {unit}"
    return f"{nbytes} B"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _parse_size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--size={text}: {error}") from error
