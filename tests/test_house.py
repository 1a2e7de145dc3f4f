"""What documents and tool settings say about the source is so."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import hicache
from hicache.config import CacheConfig, ServeConfig, Settings

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/design.md",
    "docs/models.md",
    "docs/exactness.md",
    "docs/prefetch.md",
    "docs/ranks.md",
    "docs/storage-backends.md",
    "docs/storage.md",
    "docs/simulate.md",
    "docs/operations.md",
    "docs/tenants.md",
    "CHANGELOG.md",
]
CODE_BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))


def blocks(document: str, language: str) -> list[str]:
    return [text for found, text in CODE_BLOCK.findall(read(document)) if found == language]


def contract(kind: str) -> dict[str, Any]:
    (found,) = [each for each in project()["tool"]["importlinter"]["contracts"] if each["type"] == kind]
    return dict(found)


def layers() -> list[str]:
    """The modules from the lowest layer to the highest."""
    lines = [line.replace("(", "").replace(")", "") for line in reversed(contract("layers")["layers"])]
    return [name.strip() for line in lines for name in line.split("|")]


@pytest.mark.parametrize("block", blocks("README.md", "python"))
def test_python_in_the_readme_compiles(block: str):
    compile(block, "README.md", "exec")


def test_embedding_takes_fifteen_lines():
    (embedding,) = [block for block in blocks("README.md", "python") if "build_kv_cache" in block]
    assert len([line for line in embedding.splitlines() if line]) <= 15


def test_settings_in_the_readme_are_accepted():
    (example,) = blocks("README.md", "toml")
    tables = tomllib.loads(example)
    Settings(cache=CacheConfig(**tables["cache"]), serve=ServeConfig(**tables["serve"]))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_targets_that_documents_name_are_in_the_makefile(document: str):
    targets = set(re.findall(r"^(\w+):", read("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make(?: -s)? (\w+)", read(document), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_somewhere(document: str):
    links = re.findall(r"\]\(([^)#:]+)\)", read(document))
    assert [link for link in links if not (ROOT / document).parent.joinpath(link).exists()] == []


def test_every_module_has_a_layer_and_the_table_shows_them_in_order():
    source = Path(hicache.__file__).parent
    modules = {path.stem for path in source.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__", "__main__"} <= set(layers())
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", read("CONTRIBUTING.md"), re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == layers()


def test_torch_is_forbidden_up_to_the_tree_in_storage_and_in_the_simulator():
    lowest = layers()[: layers().index("tree") + 1]
    forbidden = contract("forbidden")
    assert forbidden["source_modules"] == [f"hicache.{name}" for name in [*lowest, "storage", "simulate"]]
    assert "torch" in forbidden["forbidden_modules"]


def test_ci_runs_what_the_readme_tells_a_newcomer_to_run():
    assert "make test" in read(".ci/run").splitlines()
    assert "make test" in "\n".join(blocks("README.md", "sh"))


def test_the_core_depends_on_little():
    names = [re.split(r"[<>=]", requirement)[0] for requirement in project()["project"]["dependencies"]]
    assert names == ["fastcrc", "numpy", "pydantic"]
