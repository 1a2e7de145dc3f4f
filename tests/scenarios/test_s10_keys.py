"""S10: what makes equal tokens mean different bytes is in every key, in full, tagged and with its length."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from hicache.keys import Namespace, adapter_identity, page_keys
from hicache.storage import PageStore, StorageKey, chain_keys
from hicache.storage.file import FileBackend

BASE = Namespace("model", "weights", "bfloat16", 16, "geometry")
TOKENS = np.arange(160, dtype="<u4").tobytes()


def keys_of(namespace: Namespace) -> list[StorageKey]:
    first = namespace.fingerprint
    return chain_keys(first, "kv", first, page_keys(first, TOKENS, 16))


def media(content: bytes) -> str:
    """Two media whose digests agree in their first 64 bits and last 128."""
    return "f" * 16 + sha256(content).hexdigest()[16:32] + "0" * 32


VARIANTS = {
    "bare": BASE,
    "adapter": BASE.with_adapter(adapter_identity("a", "w1", 1.0)),
    "other adapter": BASE.with_adapter(adapter_identity("b", "w1", 1.0)),
    "reloaded under the same name": BASE.with_adapter(adapter_identity("a", "w2", 1.0)),
    "other scale": BASE.with_adapter(adapter_identity("a", "w1", 2.0)),
    "adapter X": BASE.with_adapter("X"),
    "salt X": BASE.with_salt("X"),
    "a, bc": replace(BASE, adapter="a", salt="bc"),
    "ab, c": replace(BASE, adapter="ab", salt="c"),
    "one picture": BASE.with_salt(media(b"one")),
    "other picture": BASE.with_salt(media(b"other")),
    "other shard": replace(BASE, shard="1/2"),
    "other page size": replace(BASE, page_size=32),
    "draft": replace(BASE, draft_lookahead=1),
}


def test_each_finds_only_its_own_pages_in_storage(tmp_path: Path):
    store = PageStore(FileBackend(tmp_path))
    for number, (name, namespace) in enumerate(VARIANTS.items()):
        keys = keys_of(namespace)
        assert not store.contains(keys).any(), name
        assert store.write(keys, [memoryview(bytes([number]) * 100) for _ in keys]).all()
    for number, namespace in enumerate(VARIANTS.values()):
        buffers = [bytearray(100) for _ in range(10)]
        assert store.read(keys_of(namespace), [memoryview(buffer) for buffer in buffers]).ok.all()
        assert buffers == [bytes([number]) * 100] * 10
    store.close()


def test_tokens_share_pages_up_to_where_they_differ():
    first = BASE.fingerprint
    changed = bytearray(TOKENS)
    changed[4 * 100] ^= 1
    ours, other = page_keys(first, TOKENS, 16), page_keys(first, bytes(changed), 16)
    shared = 100 // 16
    assert ours[: 32 * shared] == other[: 32 * shared]
    theirs = {other[i : i + 32] for i in range(0, len(other), 32)}
    assert not theirs & {ours[i : i + 32] for i in range(32 * shared, len(ours), 32)}
