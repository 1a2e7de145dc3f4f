"""What `hicache` exports is a decision: this list changes together with the README, or not at all."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import hicache

EXPORTED = [
    "Cache",
    "CacheConfig",
    "CacheError",
    "CapacityError",
    "Checkpoint",
    "ClosedError",
    "ConfigError",
    "Coverage",
    "DistributedAgree",
    "Flushed",
    "Full",
    "HostPoolGroup",
    "HybridCacheController",
    "Imported",
    "InUseError",
    "InvariantError",
    "Namespace",
    "Place",
    "PoolEntry",
    "PoolTransfer",
    "QueueFullError",
    "Quota",
    "RankError",
    "Retracted",
    "SidecarPoolSpec",
    "StorageError",
    "Tier",
    "TransferError",
    "UnifiedRadixCache",
    "Window",
    "__version__",
    "build_kv_cache",
    "maybe_register_hicache_draft",
]

HEAVY = ["torch", "transformers", "fastapi", "pydantic", "numpy", "hicache.engine", "hicache.server", "hicache.storage"]


def test_exported_names():
    assert sorted(vars(hicache)["__all__"]) == EXPORTED


@pytest.mark.parametrize("name", EXPORTED)
def test_every_export_can_be_loaded(name: str):
    assert getattr(hicache, name) is not None
    assert name in dir(hicache)


def test_type_checkers_see_the_same_names_from_the_same_modules():
    source = Path(hicache.__file__).read_text(encoding="utf-8")
    declared = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert sorted([*declared, "__version__"]) == EXPORTED
    for name, module in declared.items():
        assert getattr(import_module(str(module)), name) is getattr(hicache, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="NoSuchThing"):
        hicache.NoSuchThing  # noqa: B018


def loaded_after(statement: str, names: list[str]) -> list[str]:
    program = f"import sys; {statement}; print(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_importing_hicache_loads_nothing_heavy():
    assert loaded_after("import hicache", HEAVY) == []


def test_the_names_of_the_core_load_no_torch():
    names = ", ".join(name for name in EXPORTED if name != "__version__")
    assert loaded_after(f"from hicache import {names}", ["torch", "transformers", "fastapi", "hicache.server"]) == []
