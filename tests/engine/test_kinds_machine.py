"""All kinds of state, in any mixture of trouble: tokens are those of transformers, and nothing is left behind."""

from pathlib import Path

import pytest

from tests.engine.wild import Wild
from tests.engine.wild_subject import Subject, mtp_subject, subject

FAMILIES = (
    "llama",
    "mistral",
    "gemma3_text",
    "gpt_oss",
    "llama4_text",
    "deepseek_v3",
    "deepseek_v32",
    "qwen3_next",
    "kimi_linear",
    "falcon_h1",
    "mamba2",
    "lfm2",
    "gemma4_text",
)
FULL_SEEDS = [pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20)]


def run(given: Subject, seed: int, *, drafts: bool, lossy: bool = False, requests: int = 5) -> Wild:
    """One run from the first request to a restart; what is asked again then rests on what was kept."""
    wild = Wild(given, seed, drafts=drafts, lossy=lossy)
    wild.run(requests)
    wild.again()
    if wild.setup.storage is not None:
        wild.restart()
    wild.bench.core.close()
    return wild


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    """Checkpoints with one and with two MTP layers."""
    folder: Path = tmp_path_factory.mktemp("mtp")
    return [mtp_subject(folder / str(depths), depths) for depths in (1, 2)]


@pytest.mark.parametrize("seed", [0, *FULL_SEEDS])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_is_that_of_the_model_alone(family, seed):
    number = FAMILIES.index(family)
    run(subject(family), 100 * number + seed, drafts=(number + seed) % 2 == 1)


@pytest.mark.parametrize("seed", [0, *FULL_SEEDS])
def test_and_with_mtp_layers(with_mtp, seed):
    run(with_mtp[seed % 2], 2000 + seed, drafts=True)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("family", FAMILIES)
def test_completions_that_never_come_cost_memory_but_no_token(family, seed):
    number = FAMILIES.index(family)
    run(subject(family), 3000 + 100 * number + seed, drafts=seed % 2 == 1, lossy=True)
