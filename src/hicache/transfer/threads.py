"""An executor of threads: one each for backups, loads and stores, so that they keep their order; some for fetches."""

import queue
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from hicache.errors import ClosedError
from hicache.transfer.messages import Backup, Clear, Completion, Delete, Load, Message, Store
from hicache.transfer.work import is_refused, refused, run


class ThreadExecutor:
    """Runs transfers on threads. numpy and file system calls let go of the interpreter: they run beside the owner.

    A store that is left alone keeps nothing waiting: what no thread has begun for it ends at the next `poll`.
    """

    def __init__(self, fetch_workers: int = 2) -> None:
        self._answers: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._backups = ThreadPoolExecutor(1, "hicache-backup")
        self._loads = ThreadPoolExecutor(1, "hicache-load")
        self._stores = ThreadPoolExecutor(1, "hicache-store")
        self._fetches = ThreadPoolExecutor(fetch_workers, "hicache-fetch")
        self._begun: dict[int, tuple[Message, Future[None]]] = {}
        self._closed = False

    def submit(self, message: Message) -> None:
        """Take a transfer on. Returns at once. Raises ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the transfer threads have ended; build a new cache")
        self._begun[message.id] = (message, self._lane(message).submit(self._run, message))

    def poll(self) -> Sequence[Completion]:
        """What has ended since the last call."""
        waiting = [pair for pair in self._begun.values() if is_refused(pair[0])]
        answers = [refused(message) for message, future in waiting if future.cancel()]
        while not self._answers.empty():
            answers.append(self._answers.get_nowait())
        for answer in answers:
            self._begun.pop(answer.id, None)
        return answers

    def close(self) -> Sequence[Completion]:
        """Let every transfer end, stop the threads, and return what had not been polled."""
        self._closed = True
        for lane in (self._backups, self._loads, self._stores, self._fetches):
            lane.shutdown(wait=True)
        return self.poll()

    def _lane(self, message: Message) -> ThreadPoolExecutor:
        match message:
            case Backup():
                return self._backups
            case Load():
                return self._loads
            case Store() | Delete() | Clear():
                return self._stores
            case _:
                return self._fetches

    def _run(self, message: Message) -> None:
        self._answers.put(run(message))
        if isinstance(message, Load):
            message.progress.end()
