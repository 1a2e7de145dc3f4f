"""Equal keys mean equal tokens, model, layout and tenant, on every machine and after every restart."""

import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from hicache.errors import ConfigError, StorageError

KEY_BYTES = 32
"""Length of a page key and of a namespace fingerprint: a full SHA-256 digest, never a shortened one."""

TOKEN_BYTES = 4
"""A token is a little-endian uint32."""

WHOLE = "0/1"
"""The shard that is all of it."""

Part: TypeAlias = str | int | bytes

_SETTLED_NS = 2_000_000_000
"""A file that changed less than this long ago may change again within one tick of its clock: not remembered."""

_READ_BYTES = 1 << 20


def digest_parts(parts: Mapping[str, Part]) -> bytes:
    """SHA-256 (32 bytes) over named parts, each with its tag, type and length, in order of their names.

    No two different mappings give the same input to the hash: `{"a": "bc"}` differs from `{"ab": "c"}`, `1` from `"1"`.
    """
    hasher = hashlib.sha256(b"hicache parts 1\0")
    for name in sorted(parts):
        kind, value = _encode_part(parts[name])
        tag = name.encode("utf-8", "surrogatepass")
        hasher.update(b"%d:%b%b%d:" % (len(tag), tag, kind, len(value)))
        hasher.update(value)
    return hasher.digest()


def _encode_part(part: Part) -> tuple[bytes, bytes]:
    if isinstance(part, str):
        return b"s", part.encode("utf-8", "surrogatepass")
    if isinstance(part, int):
        return b"i", str(int(part)).encode()
    return b"b", bytes(part)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that makes equal tokens mean different bytes. Two namespaces share no page, in any tier.

    `weights` and `geometry` are fingerprints (see `weights_fingerprint`, `PoolGeometry.fingerprint`); `shard` is
    "rank/ranks"; `adapter` names weights and scale, not only a name (see `adapter_identity`). `tenant` says whose pages
    these are, `salt` separates pages of one tenant; both are apart, so that "a" with "bc" is not "ab" with "c", and an
    empty one is none. Raises ConfigError when a size makes no sense.
    """

    model: str
    weights: str
    dtype: str
    page_size: int
    geometry: str
    shard: str = WHOLE
    adapter: str = ""
    salt: str = ""
    draft_lookahead: int = 0
    tenant: str = ""
    fingerprint: bytes = field(init=False, repr=False, compare=False)
    """32 bytes: the parent of a prefix's first page key."""

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError(f"page_size is {self.page_size}; a page holds at least 1 token")
        if self.draft_lookahead < 0:
            raise ConfigError(f"draft_lookahead is {self.draft_lookahead}; it is a count of tokens, 0 or more")
        parts: dict[str, Part] = {
            "model": self.model,
            "weights": self.weights,
            "dtype": self.dtype,
            "page_size": self.page_size,
            "geometry": self.geometry,
            "shard": self.shard,
            "adapter": self.adapter,
            "salt": self.salt,
            "draft_lookahead": self.draft_lookahead,
        }
        if self.tenant:
            parts["tenant"] = self.tenant
        object.__setattr__(self, "fingerprint", digest_parts(parts))

    @property
    def tenancy(self) -> bytes:
        """What of it does not depend on where a rank stands: the same on every rank for the same request."""
        parts: dict[str, Part] = {"model": self.model, "adapter": self.adapter, "salt": self.salt}
        return digest_parts(parts | {"tenant": self.tenant, "page_size": self.page_size})

    def with_salt(self, salt: str) -> "Namespace":
        """The same namespace with another salt; "" is none."""
        return replace(self, salt=salt)

    def with_tenant(self, tenant: str, salt: str = "") -> "Namespace":
        """The same namespace for another tenant, with a salt of its own; "" is nobody in particular."""
        return replace(self, tenant=tenant, salt=salt)

    def with_adapter(self, adapter: str) -> "Namespace":
        """The same namespace under an adapter's identity; "" is the bare model."""
        return replace(self, adapter=adapter)


def adapter_identity(name: str, weights: str, scale: float) -> str:
    """What `Namespace.adapter` should hold: 64 hex digits over name, weights fingerprint and scale.

    An adapter loaded again under the same name with other weights, or used at another scale, is another adapter.
    """
    return digest_parts({"name": name, "weights": weights, "scale": float(scale).hex()}).hex()


def page_keys(parent: bytes, tokens: bytes | bytearray | memoryview, page_size: int) -> bytes:
    """The keys of all full pages of `tokens`, 32 bytes each, joined.

    `tokens` are little-endian uint32 (4 bytes per token); a partial last page has no key. Page i's key is
    SHA-256(key of page i - 1 || tokens of page i); `parent` stands for the page before the first one: its key, or the
    namespace fingerprint at the start of a prefix. Raises ConfigError if `parent` is not 32 bytes.
    """
    if len(parent) != KEY_BYTES:
        raise ConfigError(f"parent key has {len(parent)} bytes; a page key or namespace fingerprint has {KEY_BYTES}")
    view = memoryview(tokens).cast("B")
    page_bytes = page_size * TOKEN_BYTES
    sha256 = hashlib.sha256
    keys = []
    for start in range(0, len(view) - page_bytes + 1, page_bytes):
        hasher = sha256(parent)
        hasher.update(view[start : start + page_bytes])
        parent = hasher.digest()
        keys.append(parent)
    return b"".join(keys)


class FingerprintMemo:
    """Remembers the SHA-256 of files by path, size, times and inode, so that a start doesn't hash gigabytes again.

    One JSON file, private to the user, replaced atomically; a missing, foreign or damaged one is an empty memo.
    `None` remembers within this object only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._digests: dict[str, str] = _read_memo(path) if path is not None else {}
        self.hashed_bytes = 0
        """Bytes that had to be read, in this object's life."""

    def file_digest(self, path: Path) -> str:
        """SHA-256 of the file's bytes, 64 hex digits. Raises StorageError if it can't be read or changes meanwhile."""
        try:
            before = os.stat(path)
            known = self._digests.get(_memo_key(path, before))
            if known is not None:
                return known
            digest, read_bytes = _hash_file(path)
            after = os.stat(path)
        except OSError as error:
            raise StorageError(f"cannot read weights file {path}: {error.strerror}") from error
        self.hashed_bytes += read_bytes
        if _memo_key(path, before) != _memo_key(path, after):
            raise StorageError(f"weights file {path} changed while it was read; start again when it is complete")
        if time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > _SETTLED_NS:
            self._digests[_memo_key(path, after)] = digest
            self._save()
        return digest

    def _save(self) -> None:
        if self._path is None:
            return
        merged = _read_memo(self._path) | self._digests
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace_private(self._path, json.dumps({"format": 1, "sha256": merged}, indent=0).encode())
        except OSError:
            return  # a memo that can't be kept costs time at the next start, nothing else


def weights_fingerprint(files: Sequence[Path], memo: FingerprintMemo) -> str:
    """64 hex digits over the content of all files and their names below the folder they share.

    The folder itself plays no part, nor the order given: a moved or copied model keeps its fingerprint, and one changed
    byte gives another. Raises ConfigError without files or with one twice, StorageError if one can't be read.
    """
    if not files:
        raise ConfigError("no weights files were given; a fingerprint needs at least one")
    # The last name is kept as it is: a hub snapshot is a folder of links to blobs named by their hash.
    paths = [Path(os.path.abspath(file)) for file in files]
    root = Path(os.path.commonpath([path.parent for path in paths]))
    names = [path.relative_to(root).as_posix() for path in paths]
    if len(set(names)) != len(names):
        raise ConfigError(f"a weights file is listed twice in {sorted(names)}")
    return digest_parts({name: memo.file_digest(path) for name, path in zip(names, paths, strict=True)}).hex()


def _memo_key(path: Path, status: os.stat_result) -> str:
    times = f"{status.st_mtime_ns}:{status.st_ctime_ns}"
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{times}:{os.path.abspath(path)}"


def _hash_file(path: Path) -> tuple[str, int]:
    hasher = hashlib.sha256()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    read_bytes = 0
    with open(path, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise StorageError(f"weights file {path} is not a regular file")
        while count := file.readinto(buffer):
            hasher.update(view[:count])
            read_bytes += count
    return hasher.hexdigest(), read_bytes


def _read_memo(path: Path) -> dict[str, str]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict) or data.get("format") != 1 or not isinstance(data.get("sha256"), dict):
        return {}
    return {key: value for key, value in data["sha256"].items() if isinstance(value, str) and len(value) == 64}


def _replace_private(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
