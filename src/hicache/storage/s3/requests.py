"""Requests run side by side and their call ends in time; what a request made is touched by the caller only.

So nothing is written to a host page, nor read from one, after the call that lent it has returned.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from hicache.storage.remote import Deadline

T = TypeVar("T")

_REQUEST = re.compile(r"Error performing [a-z]+ request: |Error performing [A-Z]+ \S+ in \S+ - ")
_SAID_CHARACTERS = 300
_LATE = "does not answer in time"

REQUEST_ERRORS = (
    AlreadyExistsError,
    GenericError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    OSError,
)
REFUSALS = (PermissionDeniedError, UnauthenticatedError)
"""Errors that mean: the credentials are wrong, or have no right to this."""
ABSENT = (NotFoundError, FileNotFoundError)


@dataclass(frozen=True, slots=True)
class Failed:
    """A request came to nothing, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Answered(Generic[T]):
    """What a request returned; None: there is no such object."""

    value: T | None


Outcome: TypeAlias = Answered[T] | Failed


class Requests:
    """Threads that wait for a server. Thread-safe."""

    def __init__(self, connections: int) -> None:
        self._connections = connections
        self._threads = ThreadPoolExecutor(connections, "hicache-s3")

    def run(
        self, count: int, prepare: Callable[[int], Callable[[], T]], deadline: Deadline
    ) -> Iterator[tuple[int, Outcome[T]]]:
        """Outcome of each of `count` requests, as they end. `prepare(i)` is called by the caller, shortly before.

        What is not answered by the deadline is Failed, and its answer is thrown away.
        """
        pending: dict[Future[T], int] = {}
        begun = 0
        try:
            while pending or begun < count:
                while begun < count and len(pending) < self._connections:
                    pending[self._threads.submit(prepare(begun))] = begun
                    begun += 1
                ended, _ = wait(pending, deadline.left_s(), FIRST_COMPLETED)
                for future in ended:
                    yield pending.pop(future), _outcome(future)
        except TimeoutError:
            for future in pending:
                future.cancel()
            for i in (*pending.values(), *range(begun, count)):
                yield i, Failed(_LATE)

    def close(self) -> None:
        """Waits for requests under way: each has its timeout."""
        self._threads.shutdown(wait=True)


def explain(error: Exception) -> str:
    """The first line of what went wrong, without addresses, not too long."""
    line = _REQUEST.sub("", str(error).strip().partition("\n")[0]).removesuffix(":").strip()
    return line[:_SAID_CHARACTERS] or type(error).__name__


def has_status(error: Exception, status: int) -> bool:
    """Whether a server answered with this HTTP status."""
    return f"status code: {status} " in str(error)


def failures(outcomes: Sequence[Outcome[T]]) -> str | None:
    """The reason of the first that failed."""
    return next((outcome.reason for outcome in outcomes if isinstance(outcome, Failed)), None)


def _outcome(future: Future[T]) -> Outcome[T]:
    try:
        return Answered(future.result())
    except ABSENT:
        return Answered(None)
    except REQUEST_ERRORS as error:
        return Failed(explain(error))
