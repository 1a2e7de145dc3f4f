"""The error classes: one exists only where a caller can react differently. A miss is a value, not an error."""


class CacheError(Exception):
    """Base of every error that hicache raises on purpose."""


class ConfigError(CacheError):
    """A setting or a registration contradicts itself or cannot be met. Change what the message names."""


class CapacityError(CacheError):
    """More was asked than can ever be there. Ask for less, or give the pool more memory."""


class QueueFullError(CacheError):
    """As many requests wait as may. Ask again: `retry_after_s`, whole seconds, says when that is likely to help."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InUseError(CacheError):
    """Requests run on what was to be taken away. Ask again when they have ended, or force it."""


class TransferError(CacheError):
    """A copy between tiers failed. The bytes at its destination are not to be used."""


class StorageError(CacheError):
    """A storage backend failed as a whole. Serving goes on without it."""


class RankError(CacheError):
    """Ranks have come to differ, or one is gone: nothing can be agreed any more. End all ranks and start them again."""


class ClosedError(CacheError):
    """The cache was closed; build a new one."""


class InvariantError(Exception):
    """A bug in hicache or in how it was called. Never caught: the state can't be trusted any more."""
