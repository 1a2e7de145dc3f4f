"""The embedding that the README shows runs as it stands, on a model that only counts what it is asked to compute."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache import Cache, Namespace
from hicache.builder import full_attention
from hicache.device.array import ArrayDevicePool

README = Path(__file__).parent.parent / "README.md"
PAGE_TOKENS = 16
MODEL = full_attention(layers=2, kv_heads=1, head_dim=4, dtype="float32", page_size=PAGE_TOKENS)
NAMESPACE = Namespace("model", "weights", "float32", PAGE_TOKENS, MODEL.fingerprint)
PROMPT = np.arange(10 * PAGE_TOKENS + 5, dtype=np.uint32)


@dataclass
class Layer:
    index: int
    computed: list[int] = field(default_factory=list)

    def run(self, tokens: np.ndarray, slots: np.ndarray) -> None:
        assert len(slots) == -(-len(PROMPT) // PAGE_TOKENS)
        self.computed.append(len(tokens))


@pytest.fixture
def example(tmp_path: Path) -> Iterator[dict[str, Any]]:
    (source,) = re.findall(
        r"```python\n(.*?)```", README.read_text(encoding="utf-8").split("## Embed it")[1], re.DOTALL
    )
    source = source.replace("GiB", "MiB").replace("file:./store", f"file:{tmp_path}/store")
    names: dict[str, Any] = {
        "model_config": MODEL,
        "wrap_tensors": ArrayDevicePool.layer_first,
        "model": SimpleNamespace(layers=[Layer(0), Layer(1)]),
    }
    exec(compile(source, "README.md", "exec"), names)
    yield names
    names["cache"].close()


def settle(cache: Cache) -> None:
    deadline = time.monotonic() + 60
    while cache.stats().in_flight and time.monotonic() < deadline:
        cache.poll()
        time.sleep(0.001)
    cache.audit()


def test_a_prompt_that_comes_again_is_computed_only_where_it_must_be(example: dict[str, Any]):
    cache, prefill = example["cache"], example["prefill"]
    for _ in range(2):
        ticket = cache.prefetch(PROMPT, NAMESPACE)
        settle(cache)
        prefill(PROMPT, NAMESPACE, ticket)
        settle(cache)
    assert (cache.stats().open_matches, cache.stats().pins) == (0, 0)
    for layer in example["model"].layers:
        assert layer.computed == [len(PROMPT), len(PROMPT) % PAGE_TOKENS]
