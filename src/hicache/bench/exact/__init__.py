"""`hicache bench exact`: what the cache gives back is what was computed, for every kind of state, or the row fails."""

import json
import logging
import sys
from collections.abc import Iterable
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hicache.bench.exact.families import measure
from hicache.bench.exact.plan import FULL, SHORT
from hicache.bench.exact.refused import REFUSALS, measure_refusal
from hicache.bench.exact.results import Check, Refusal, Report, Row, table
from hicache.errors import ConfigError
from hicache.testing.families import TINY

__all__ = ["REFUSALS", "Check", "Refusal", "Report", "Row", "find_families", "report", "run"]


def run(families: Iterable[str], short: bool, as_json: bool) -> int:
    """Print the table, or with `as_json` one JSON object and nothing else on stdout. 1 when anything has failed.

    `families`: model types, all of them if there are none. Raises ConfigError for one that is not known.
    """
    logging.basicConfig(format="hicache: %(message)s", stream=sys.stderr)
    names = find_families(families)
    _prepare()
    found = report(names, short)
    print(json.dumps(found.to_json()) if as_json else table(found))
    return 0 if found.passed else 1


def find_families(names: Iterable[str]) -> tuple[str, ...]:
    """The families meant: of a model with more inputs than text, the name without `_text` will do. None: all."""
    known = (*TINY, *REFUSALS)
    found = []
    for name in names:
        family = name if name in known else f"{name}_text"
        if family not in known:
            raise ConfigError(f"--families: there is no family {name!r}; there are: {', '.join(known)}")
        found.append(family)
    return tuple(found) or known


def report(families: Iterable[str], short: bool) -> Report:
    """All rows, one after the other."""
    rows = []
    refusals = []
    for family in families:
        print(f"hicache: {family}...", file=sys.stderr, flush=True)
        if family in REFUSALS:
            refusals.append(measure_refusal(family))
        else:
            rows.append(measure(family, SHORT if short else FULL))
    return Report(tuple(rows), tuple(refusals))


def _prepare() -> None:
    """One thread, since the models are tiny; no advice from transformers on kernels and sizes."""
    torch.set_num_threads(1)
    library: Any = transformers_logging
    library.set_verbosity_error()
