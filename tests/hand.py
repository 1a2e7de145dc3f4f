"""An executor that runs a transfer when the test says so, and spoils the pages that the test names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hicache.errors import ClosedError
from hicache.testing.simulator import spoil
from hicache.transfer import Completion, Load, Message
from hicache.transfer.work import run


class HandExecutor:
    """Keeps every message until `run` is called. Messages of one kind run in order."""

    def __init__(self) -> None:
        self.waiting: list[Message] = []
        self._ready: list[Completion] = []
        self._closed = False

    def submit(self, message: Message) -> None:
        if self._closed:
            raise ClosedError("closed")
        self.waiting.append(message)

    def of(self, *kinds: type[Message]) -> list[Message]:
        """What waits, of these kinds (of all by default)."""
        return [message for message in self.waiting if not kinds or isinstance(message, kinds)]

    def run(
        self, *kinds: type[Message], bad: Mapping[str, Sequence[int]] | None = None, count: int | None = None
    ) -> int:
        """Run the first `count` (default: all) of what waits; the pages of `bad`, by pool, come out wrong."""
        chosen = self.of(*kinds)[:count]
        for message in chosen:
            self.waiting.remove(message)
            completion = run(message)
            if bad is not None:
                good = {pool: _without(pages, bad.get(pool, ())) for pool, pages in completion.good.items()}
                spoil(message, good)
                completion = replace(completion, good=good)
            self._ready.append(completion)
            if isinstance(message, Load):
                message.progress.end()
        return len(chosen)

    def settle(self, poll: Callable[[], None], rounds: int = 20) -> None:
        """Run whatever waits, and whatever follows from it."""
        for _ in range(rounds):
            self.run()
            poll()

    def poll(self) -> Sequence[Completion]:
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> Sequence[Completion]:
        self._closed = True
        self.run()
        return self.poll()


def _without(pages: np.ndarray, bad: Sequence[int]) -> np.ndarray:
    good = pages.copy()
    good[[page for page in bad if page < len(good)]] = False
    return good
