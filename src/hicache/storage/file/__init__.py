"""The file store: one private file per page, in a folder that several processes may share."""

from hicache.storage.file.backend import FileBackend

__all__ = ["FileBackend"]
