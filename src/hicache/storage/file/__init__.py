"""The file store: values in slots of a few private files, in a folder that several processes may share."""

from hicache.storage.file.backend import FileBackend

__all__ = ["FileBackend"]
