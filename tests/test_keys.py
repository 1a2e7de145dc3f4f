"""Keys: stable, chained, and never equal for what differs."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError, StorageError
from hicache.keys import FingerprintMemo, Namespace, adapter_identity, digest_parts, page_keys, weights_fingerprint

FIXED_NAMESPACE = "5306b062014d64a132bfe97e53b40f4ed5e5873f428cf255a5f1c427ecbb3503"
FIXED_PAGE = "6afa95c4cadd102693d0da154abd90cf4b9cde21505051bc9370e64870de9a92"

BASE = Namespace("model", "weights", "bfloat16", 16, "geometry")


def tokens(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def test_a_fingerprint_is_fixed_for_ever():
    assert BASE.fingerprint.hex() == FIXED_NAMESPACE
    assert page_keys(BASE.fingerprint, tokens(*range(16)), 16).hex() == FIXED_PAGE


def test_every_field_counts():
    changed = [
        replace(BASE, **{item.name: getattr(BASE, item.name) + (1 if item.type in (int, "int") else "x")})
        for item in fields(Namespace)
        if item.init
    ]
    prints = {namespace.fingerprint for namespace in [BASE, *changed]}
    assert len(changed) == 10
    assert len(prints) == 11


def test_parts_are_tagged_and_have_lengths():
    assert BASE.with_adapter("X").fingerprint != BASE.with_salt("X").fingerprint
    assert replace(BASE, model="a", weights="bc").fingerprint != replace(BASE, model="ab", weights="c").fingerprint
    assert digest_parts({"a": "bc"}) != digest_parts({"ab": "c"})
    assert digest_parts({"a": "1"}) != digest_parts({"a": 1}) != digest_parts({"a": b"1"})
    for swallowed in ("xbsy", "xby", "x1:bs1:y", "x\0by"):
        assert digest_parts({"a": "x", "b": "y"}) != digest_parts({"a": swallowed})
    assert digest_parts({"a": "x", "b": ""}) != digest_parts({"a": "x"})
    assert digest_parts({"b": "1", "a": "2"}) == digest_parts({"a": "2", "b": "1"})


SHORT = st.text("ab:1s", max_size=3)
PARTS = st.dictionaries(SHORT, SHORT | st.integers(0, 12) | st.binary(max_size=2), max_size=4)


@given(PARTS, PARTS)
def test_other_parts_other_digest(one, other):
    assert (digest_parts(one) == digest_parts(other)) == (one == other)


def test_where_tenant_and_salt_meet_matters():
    assert BASE.with_tenant("a", "bc").fingerprint != BASE.with_tenant("ab", "c").fingerprint
    assert BASE.with_tenant("", "a").fingerprint != BASE.with_tenant("a").fingerprint
    assert BASE.with_tenant("", "a") == BASE.with_salt("a")
    assert BASE.with_tenant("a", "bc").tenancy != BASE.with_tenant("ab", "c").tenancy


def test_an_empty_salt_is_no_salt():
    assert BASE.with_salt("") == BASE
    assert BASE.with_salt("a").with_salt("") == BASE
    assert BASE.with_salt("").fingerprint == BASE.fingerprint


def test_lone_surrogates_and_forms_of_one_letter_stay_apart():
    salts = ["\ud800", "\ud801", "e\u0301", "\u00e9", "\0", ""]
    assert len({BASE.with_salt(salt).fingerprint for salt in salts}) == len(salts)


def test_sizes_that_make_no_sense():
    with pytest.raises(ConfigError, match="page_size is 0"):
        replace(BASE, page_size=0)
    with pytest.raises(ConfigError, match="draft_lookahead is -1"):
        replace(BASE, draft_lookahead=-1)


def test_an_adapter_is_its_weights_and_scale():
    seen = {adapter_identity(*what) for what in [("a", "w", 1.0), ("a", "v", 1.0), ("a", "w", 0.5), ("b", "w", 1.0)]}
    assert len(seen) == 4
    assert adapter_identity("a", "w", 1) == adapter_identity("a", "w", 1.0)


def test_keys_chain():
    run = tokens(*range(10))
    keys = page_keys(BASE.fingerprint, run, 4)
    first = hashlib.sha256(BASE.fingerprint + run[:16]).digest()
    assert keys == first + hashlib.sha256(first + run[16:32]).digest()
    assert page_keys(first, run[16:], 4) == keys[32:]
    assert page_keys(BASE.fingerprint, run[:12], 4) == b""
    assert page_keys(BASE.fingerprint, memoryview(bytearray(run)), 4) == keys


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8), st.data())
def test_a_change_changes_all_keys_from_its_page_on(values, page_size, data):
    keys = page_keys(BASE.fingerprint, tokens(*values), page_size)
    assert len(keys) == len(values) // page_size * 32
    if not values:
        return
    at = data.draw(st.integers(0, len(values) - 1))
    changed = [*values[:at], values[at] ^ 1, *values[at + 1 :]]
    other = page_keys(BASE.fingerprint, tokens(*changed), page_size)
    page = at // page_size
    assert other[: page * 32] == keys[: page * 32]
    for i in range(page, len(values) // page_size):
        assert other[i * 32 : i * 32 + 32] != keys[i * 32 : i * 32 + 32]


def test_a_short_parent_is_refused():
    with pytest.raises(ConfigError, match="parent key has 16 bytes"):
        page_keys(b"x" * 16, b"", 4)


@pytest.fixture
def model(tmp_path: Path) -> list[Path]:
    """Two weights files with a header each, as old as a model on disk is."""
    folder = tmp_path / "model"
    folder.mkdir()
    files = [folder / "model-1.safetensors", folder / "model-2.safetensors"]
    for i, file in enumerate(files):
        file.write_bytes(b"header" * 20 + bytes([i]) * 5000)
    age(files)
    return files


def age(files: list[Path]) -> None:
    for file in files:
        os.utime(file, (1_000_000_000, 1_000_000_000))


class LongAgo:
    """Makes files that were just written count as old."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() + 10_000_000_000)


def test_a_moved_or_copied_model_keeps_its_fingerprint(model: list[Path], tmp_path: Path):
    before = weights_fingerprint(model, FingerprintMemo())
    assert weights_fingerprint(model[::-1], FingerprintMemo()) == before
    shutil.copytree(tmp_path / "model", tmp_path / "a" / "copy")
    assert weights_fingerprint(sorted((tmp_path / "a" / "copy").iterdir()), FingerprintMemo()) == before
    links = tmp_path / "links"
    links.mkdir()
    for file in model:
        (links / file.name).symlink_to(file)
    assert weights_fingerprint(sorted(links.iterdir()), FingerprintMemo()) == before


def test_a_changed_tensor_under_an_unchanged_header(model: list[Path], tmp_path: Path, monkeypatch):
    LongAgo(monkeypatch)
    memo = FingerprintMemo(tmp_path / "memo.json")
    before = weights_fingerprint(model, memo)
    content = bytearray(model[1].read_bytes())
    content[-1] ^= 1
    model[1].write_bytes(content)
    age(model)
    assert weights_fingerprint(model, FingerprintMemo(tmp_path / "memo.json")) != before
    assert weights_fingerprint(model, memo) != before


def test_swapped_files_are_another_model(model: list[Path]):
    before = weights_fingerprint(model, FingerprintMemo())
    one, other = (file.read_bytes() for file in model)
    model[0].write_bytes(other)
    model[1].write_bytes(one)
    assert weights_fingerprint(model, FingerprintMemo()) != before


def test_files_are_hashed_once(model: list[Path], tmp_path: Path, monkeypatch):
    LongAgo(monkeypatch)
    path = tmp_path / "cache" / "memo.json"
    first = FingerprintMemo(path)
    before = weights_fingerprint(model, first)
    assert first.hashed_bytes == sum(file.stat().st_size for file in model)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in path.parent.iterdir()] == ["memo.json"]
    again = FingerprintMemo(path)
    assert weights_fingerprint(model, again) == before
    assert again.hashed_bytes == 0


def test_a_file_that_changed_just_now_is_not_remembered(model: list[Path]):
    memo = FingerprintMemo()
    model[0].write_bytes(b"new")
    weights_fingerprint(model, memo)
    read_bytes = memo.hashed_bytes
    weights_fingerprint(model, memo)
    assert memo.hashed_bytes > read_bytes


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 2, "sha256": {}}', '{"format": 1, "sha256": {"x": 3}}'])
def test_a_damaged_memo_is_an_empty_one(model: list[Path], tmp_path: Path, content: str, monkeypatch):
    LongAgo(monkeypatch)
    path = tmp_path / "memo.json"
    path.write_text(content)
    memo = FingerprintMemo(path)
    assert weights_fingerprint(model, memo) == weights_fingerprint(model, FingerprintMemo())
    assert FingerprintMemo(path).file_digest(model[0]) == hashlib.sha256(model[0].read_bytes()).hexdigest()


def test_a_memo_that_cannot_be_kept_does_no_harm(model: list[Path], tmp_path: Path, monkeypatch):
    LongAgo(monkeypatch)
    (tmp_path / "file").write_text("")
    memo = FingerprintMemo(tmp_path / "file" / "memo.json")
    assert weights_fingerprint(model, memo) == weights_fingerprint(model, FingerprintMemo())


def test_what_cannot_be_fingerprinted(model: list[Path], tmp_path: Path):
    memo = FingerprintMemo()
    with pytest.raises(ConfigError, match="no weights files"):
        weights_fingerprint([], memo)
    with pytest.raises(ConfigError, match="listed twice"):
        weights_fingerprint([model[0], model[0]], memo)
    with pytest.raises(StorageError, match="cannot read weights file"):
        weights_fingerprint([tmp_path / "none"], memo)
    with pytest.raises(StorageError, match=r"weights file .*model"):
        weights_fingerprint([tmp_path / "model"], memo)


def test_another_hash_seed_gives_the_same_keys():
    script = (
        "from hicache.keys import Namespace, page_keys; n = Namespace('model', 'weights', 'bfloat16', 16, 'geometry');"
        "print(n.fingerprint.hex(), page_keys(n.fingerprint, bytes(640), 16).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{BASE.fingerprint.hex()} {page_keys(BASE.fingerprint, bytes(640), 16).hex()}\n".encode()}
