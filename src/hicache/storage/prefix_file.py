"""A prefix in one safetensors file is taken whole or not at all: every byte, size and name in it is checked first."""

import hashlib
import json
import os
import stat
import struct
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from hicache.errors import ConfigError, StorageError
from hicache.keys import KEY_BYTES, TOKEN_BYTES, Namespace, page_keys
from hicache.storage.codec import checksum
from hicache.units import ByteArray, PoolName

FORMAT = 1

_KEY = "hicache"
_SEAL = "zz.seal"
"""The last bytes of a file: the SHA-256 of all bytes before them."""
_SEAL_BYTES = 32
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, eq=False)
class PoolPages:
    """Pages of one pool. `data`: uint8, shape [len(places), bytes of a page], for the pages at `places`, ascending.

    `layout` is the fingerprint of what a page's bytes mean.
    """

    pool: PoolName
    layout: str
    places: tuple[int, ...]
    data: ByteArray


@dataclass(frozen=True, slots=True, eq=False)
class PrefixContent:
    """A prefix of `pages` full pages. `tokens`: little-endian uint32, with those that the last page looks ahead to."""

    namespace: Namespace
    tokens: bytes
    pages: int
    pools: tuple[PoolPages, ...]

    @property
    def keys(self) -> bytes:
        """The page keys, 32 bytes each."""
        return prefix_keys(self.namespace, self.tokens, self.pages)


Layouts: TypeAlias = Mapping[PoolName, tuple[str, int]]
"""Per pool its layout's fingerprint and the bytes of a page."""


@checked_dataclass(frozen=True, slots=True)
class _PoolPart:
    name: str
    layout: str
    page_bytes: int
    places: list[int]
    crc32c: list[int]


@checked_dataclass(frozen=True, slots=True)
class _Header:
    format: int
    namespace: dict[str, str | int]
    page_size: int
    pages: int
    keys: list[str]
    pools: list[_PoolPart]


_HEADER = TypeAdapter(_Header)
_FIELDS = (
    "model", "weights", "dtype", "page_size", "geometry", "shard", "adapter", "salt", "draft_lookahead", "tenant",
)  # fmt: skip


def prefix_keys(namespace: Namespace, tokens: bytes, pages: int) -> bytes:
    """The keys of a prefix's pages, 32 bytes each, over the tokens of a page and those that a draft looks ahead to."""
    ahead = namespace.draft_lookahead * TOKEN_BYTES
    page_bytes = namespace.page_size * TOKEN_BYTES
    blocks = [tokens[page * page_bytes : (page + 1) * page_bytes + ahead] for page in range(pages)]
    return page_keys(namespace.fingerprint, b"".join(blocks), namespace.page_size + namespace.draft_lookahead)


def write_prefix(path: Path, content: PrefixContent) -> None:
    """Writes the file, private to the user (0600), in place of an older one; never a part of it.

    Raises StorageError if it can't be written.
    """
    from safetensors.numpy import save

    tensors: dict[str, np.ndarray] = {"tokens": np.frombuffer(content.tokens, "<u4")}
    for number, pool in enumerate(content.pools):
        tensors[_name(number)] = np.ascontiguousarray(pool.data)
    tensors[_SEAL] = np.zeros(_SEAL_BYTES, np.uint8)
    body = memoryview(save(tensors, {_KEY: json.dumps(_header(content))}))[:-_SEAL_BYTES]
    try:
        _replace(path, body)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def read_prefix(path: Path) -> PrefixContent:
    """What a file holds, all of it checked. StorageError, which says why, for one that is damaged or no such file."""
    try:
        raw = _read(path)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    try:
        return _parse(raw)
    except _RefusedError as error:
        raise StorageError(f"{path} is not imported: {error}") from error


def require_same(content: PrefixContent, namespace: Namespace, layouts: Layouts) -> None:
    """Raises ConfigError, naming what differs, unless a prefix is of this namespace and of pools like these."""
    for name in _FIELDS:
        theirs, ours = _value(content.namespace, name), _value(namespace, name)
        if theirs != ours:
            shown = "" if name == "salt" else f": {theirs!r} there, {ours!r} here"
            raise ConfigError(f"the file is of another {name}{shown}; nothing was imported")
    for pool in content.pools:
        here = layouts.get(pool.pool)
        if here is None:
            raise ConfigError(
                f"the file has a pool {pool.pool!r}, and here are {sorted(layouts)}; nothing was imported"
            )
        if here != (pool.layout, pool.data.shape[1]):
            raise ConfigError(f"the file's pool {pool.pool!r} has another layout; nothing was imported")


class _RefusedError(Exception):
    """Why a file is not taken."""


def _replace(path: Path, body: memoryview) -> None:
    handle, temporary = tempfile.mkstemp(prefix=".hicache-export-", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(body)
            file.write(hashlib.sha256(body).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _name(number: int) -> str:
    return f"pool.{number:04d}"


def _value(namespace: Namespace, name: str) -> str | int:
    values: dict[str, str | int] = {
        "model": namespace.model,
        "weights": namespace.weights,
        "dtype": namespace.dtype,
        "page_size": namespace.page_size,
        "geometry": namespace.geometry,
        "shard": namespace.shard,
        "adapter": namespace.adapter,
        "salt": namespace.salt,
        "draft_lookahead": namespace.draft_lookahead,
        "tenant": namespace.tenant,
    }
    return values[name]


def _header(content: PrefixContent) -> dict[str, object]:
    keys = content.keys
    return {
        "format": FORMAT,
        "namespace": {name: _value(content.namespace, name) for name in _FIELDS},
        "page_size": content.namespace.page_size,
        "pages": content.pages,
        "keys": [keys[i : i + KEY_BYTES].hex() for i in range(0, len(keys), KEY_BYTES)],
        "pools": [
            {
                "name": pool.pool,
                "layout": pool.layout,
                "page_bytes": pool.data.shape[1],
                "places": list(pool.places),
                "crc32c": [checksum(page.tobytes()) for page in pool.data],
            }
            for pool in content.pools
        ],
    }


def _read(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise StorageError(f"{path} is not a regular file; nothing was imported")
        return file.read()


def _parse(raw: bytes) -> PrefixContent:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    if len(raw) <= _LENGTH.size + _SEAL_BYTES:
        raise _RefusedError("it is too short")
    if hashlib.sha256(memoryview(raw)[:-_SEAL_BYTES]).digest() != raw[-_SEAL_BYTES:]:
        raise _RefusedError("it is damaged, or no file that hicache exported (its checksum does not match)")
    try:
        tensors = load(raw)
        [length] = _LENGTH.unpack_from(raw)
        text = json.loads(raw[_LENGTH.size : _LENGTH.size + length])["__metadata__"][_KEY]
        header = _HEADER.validate_json(text, strict=True)
    except (SafetensorError, ValidationError, ValueError, KeyError, TypeError) as error:
        raise _RefusedError(f"it is no file that hicache exported ({type(error).__name__})") from error
    return _content(header, tensors)


def _content(header: _Header, tensors: Mapping[str, np.ndarray]) -> PrefixContent:
    if header.format != FORMAT:
        raise _RefusedError(f"it is of format {header.format}, this hicache reads {FORMAT}")
    namespace = _namespace(header)
    tokens = _array(tensors, "tokens", "<u4").tobytes()
    count = header.pages * namespace.page_size + (namespace.draft_lookahead if header.pages else 0)
    if header.pages < 1 or len(tokens) != count * TOKEN_BYTES:
        found = len(tokens) // TOKEN_BYTES
        raise _RefusedError(f"it has {found} tokens for {header.pages} pages of {namespace.page_size}")
    expected = {"tokens", _SEAL, *(_name(number) for number in range(len(header.pools)))}
    if set(tensors) != expected or len({pool.name for pool in header.pools}) != len(header.pools):
        raise _RefusedError("it has other tensors than its header says")
    content = PrefixContent(
        namespace,
        tokens,
        header.pages,
        tuple(_pages(part, tensors, _name(number), header.pages) for number, part in enumerate(header.pools)),
    )
    if content.keys.hex() != "".join(header.keys):
        raise _RefusedError("its page keys are not those of its tokens and namespace")
    return content


def _namespace(header: _Header) -> Namespace:
    if set(header.namespace) != set(_FIELDS) or header.namespace["page_size"] != header.page_size:
        raise _RefusedError("its namespace is not whole")
    texts = {name: value for name, value in header.namespace.items() if isinstance(value, str)}
    numbers = {name: value for name, value in header.namespace.items() if isinstance(value, int)}
    if set(numbers) != {"page_size", "draft_lookahead"}:
        raise _RefusedError("its namespace is not whole")
    try:
        return Namespace(**texts, page_size=numbers["page_size"], draft_lookahead=numbers["draft_lookahead"])
    except ConfigError as error:
        raise _RefusedError(str(error)) from error


def _pages(part: _PoolPart, tensors: Mapping[str, np.ndarray], name: str, pages: int) -> PoolPages:
    places = part.places
    if places != sorted(set(places)) or not all(0 <= place < pages for place in places):
        raise _RefusedError(f"pool {part.name!r} has pages at places that are none")
    if part.page_bytes < 1 or len(part.crc32c) != len(places):
        raise _RefusedError(f"pool {part.name!r} contradicts itself")
    data = _array(tensors, name, "uint8")
    if data.shape != (len(places), part.page_bytes):
        raise _RefusedError(f"tensor {name!r} has another shape than its header says")
    for place, page, crc in zip(places, data, part.crc32c, strict=True):
        if checksum(page.tobytes()) != crc:
            raise _RefusedError(f"page {place} of pool {part.name!r} is damaged")
    return PoolPages(part.name, part.layout, tuple(places), data)


def _array(tensors: Mapping[str, np.ndarray], name: str, dtype: str) -> np.ndarray:
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != np.dtype(dtype):
        raise _RefusedError(f"it has no tensor {name!r} of type {dtype}")
    return tensor
