"""The name of a value in an engine holds all of its key: format, namespace, pool and page, each as a full digest."""

from hicache.storage.chains import FORMAT_VERSION
from hicache.storage.codec import pool_digest
from hicache.storage.protocol import StorageKey

ROOT = f"hicache/{FORMAT_VERSION}"
"""What the names of all values of this format begin with; other formats lie beside it and are left alone."""


def value_name(key: StorageKey) -> str:
    """`hicache/FORMAT/NAMESPACE/POOL/PAGE`, digests in hexadecimal: nothing in it was chosen by a user."""
    return f"{namespace_prefix(key.namespace)}{pool_digest(key.pool).hex()}/{key.page.hex()}"


def namespace_prefix(namespace: bytes) -> str:
    """What the names of all values of a namespace begin with, and no others."""
    return f"{ROOT}/{namespace.hex()}/"
