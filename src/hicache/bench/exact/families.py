"""One family's row: every check runs, whatever became of the others, and what it raises is a failure."""

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hicache.bench.exact.chunks import check_chunks
from hicache.bench.exact.plan import Plan
from hicache.bench.exact.results import Check, PoolBytes, Row
from hicache.bench.exact.retraction import check_retraction
from hicache.bench.exact.sidecars import check_sidecars
from hicache.bench.exact.subject import Subject
from hicache.bench.exact.tokens import check_talk, check_tokens
from hicache.bench.exact.trips import check_bytes, check_hits, take_trips
from hicache.builder import PoolDescription
from hicache.coverage import Checkpoint

log = logging.getLogger("hicache")


def measure(family: str, plan: Plan) -> Row:
    """All checks of one family, on a model and in folders of its own."""
    start_s = time.thread_time()
    subject = Subject.of(family, plan)
    with tempfile.TemporaryDirectory(prefix="hicache-exact-") as folder:
        stores = Path(folder)
        checks = [
            *_attempt(("bytes", "hits"), lambda: _trips(subject, stores / "trips")),
            *_attempt(("tokens",), lambda: (check_tokens(subject, stores / "tokens"),)),
            *_attempt(("chunks",), lambda: (check_chunks(subject),)),
            *_attempt(("sidecars",), lambda: (check_sidecars(subject, stores / "sidecars"),)),
            *_attempt(("talk",), lambda: (check_talk(subject),)),
            *_attempt(("retraction",), lambda: (check_retraction(subject, stores / "retraction"),)),
        ]
    pools = tuple(_bytes(pool) for pool in subject.description.pools)
    return Row(family, pools, tuple(checks), time.thread_time() - start_s)


def _trips(subject: Subject, store: Path) -> tuple[Check, ...]:
    trips = take_trips(subject, store)
    return check_bytes(trips), check_hits(trips)


def _attempt(names: tuple[str, ...], checks: Callable[[], tuple[Check, ...]]) -> tuple[Check, ...]:
    try:
        return checks()
    except Exception as error:
        log.exception("%s could not be checked", " and ".join(names))
        reason = f"{type(error).__name__}: {error}"
        return tuple(Check(name, False, type(error).__name__, failures=(reason,)) for name in names)


def _bytes(pool: PoolDescription) -> PoolBytes:
    tokens = 0 if isinstance(pool.coverage, Checkpoint) else pool.geometry.tokens_per_slot
    return PoolBytes(pool.name, pool.slot_bytes, tokens)
