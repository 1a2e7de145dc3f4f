"""The executor protocol: the owner submits messages and polls completions, never blocked and never called back."""

from collections.abc import Sequence
from typing import Protocol

from hicache.transfer.messages import Completion, Message


class Executor(Protocol):
    """Moves bytes. Until a transfer's completion has been polled, its slots belong to the transfer.

    Backups run in the order of their submission, and so do loads, and stores together with deletes and clears; nothing
    else is promised between kinds, nor between fetches and queries. A load's `progress.end()` comes after its
    completion can be polled.
    """

    def submit(self, message: Message) -> None:
        """Take a transfer on. Returns at once. Raises ClosedError after `close`."""

    def poll(self) -> Sequence[Completion]:
        """What has ended since the last call."""

    def close(self) -> Sequence[Completion]:
        """End every transfer that was taken on, and return what had not been polled."""
