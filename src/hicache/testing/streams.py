"""A device that computes and copies late and in stream order, as a GPU does: nothing runs until it is told to."""

from collections import deque
from collections.abc import Callable, Sequence

from hicache.errors import ClosedError
from hicache.transfer import Backup, Completion, Event, Load, Message
from hicache.transfer.work import run


class VirtualEvent:
    """A point in a virtual stream."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        """Whether all work before the point is done."""
        return self.passed

    def wait(self) -> None:
        """Only for what runs in stream order: there, the point has been reached."""
        if not self.passed:
            raise AssertionError("waited on the host for work that has not been run: a real device would block here")


class VirtualStream:
    """Work in order. `step` runs the next piece, unless it waits for an event of another stream."""

    def __init__(self) -> None:
        self._work: deque[tuple[Event | None, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._work)

    def enqueue(self, work: Callable[[], None]) -> None:
        """Add a piece of work."""
        self._work.append((None, work))

    def wait_event(self, event: Event) -> None:
        """What is enqueued from now on runs only after `event`."""
        self._work.append((event, lambda: None))

    def record_event(self) -> VirtualEvent:
        """An event that passes once all that is enqueued now is done."""
        event = VirtualEvent()

        def reach() -> None:
            event.passed = True

        self.enqueue(reach)
        return event

    def step(self) -> bool:
        """Run one piece. False when there is none, or when it has to wait."""
        if not self._work:
            return False
        event, work = self._work[0]
        if event is not None and not event.query():
            return False
        self._work.popleft()
        work()
        return True

    def run(self) -> None:
        """Run as far as that goes."""
        while self.step():
            pass


class StreamExecutor:
    """Puts backups and loads on virtual copy streams, all else on a third; `after` becomes a wait of the stream."""

    def __init__(self) -> None:
        self.backups = VirtualStream()
        self.loads = VirtualStream()
        self.storage = VirtualStream()
        self._ended: list[Completion] = []
        self._closed = False

    def submit(self, message: Message) -> None:
        """Enqueue a transfer. Raises ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the stream executor was closed; build a new cache")
        stream = self._stream(message)
        if isinstance(message, Backup) and message.after is not None:
            stream.wait_event(message.after)
        stream.enqueue(lambda: self._end(message))

    def poll(self) -> Sequence[Completion]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> Sequence[Completion]:
        """Run all streams to their end."""
        self._closed = True
        for stream in (self.backups, self.loads, self.storage):
            stream.run()
        return self.poll()

    def _stream(self, message: Message) -> VirtualStream:
        if isinstance(message, Backup):
            return self.backups
        return self.loads if isinstance(message, Load) else self.storage

    def _end(self, message: Message) -> None:
        self._ended.append(run(message))
        if isinstance(message, Load):
            message.progress.end()
