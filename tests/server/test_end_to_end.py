"""The server over the real engine: the engine's own answers, where they came from, and nothing left behind."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from hicache.config import Settings
from hicache.engine import Engine, SamplingParams
from hicache.server import build_app
from hicache.units import Tier
from tests.engine.tiny import PAGE, ask, prompt, running, settings, write_checkpoint
from tests.server.fake_engine import wait_until
from tests.server.serving import serving

MODEL = "tiny"
ANSWER = 12
GREEDY = {"temperature": 0.0, "max_tokens": ANSWER, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / MODEL)


@pytest.fixture
def given(checkpoint: Path, tmp_path: Path) -> Settings:
    return settings(checkpoint, tmp_path, storage_url=f"file:{tmp_path / 'store'}")


@pytest.fixture
def engine(given: Settings) -> Iterator[Engine]:
    with running(given) as started:
        yield started


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with connected(engine) as connection:
        yield connection


def connected(engine: Engine) -> Any:
    """A context manager: the official client of a server over `engine`."""
    from contextlib import contextmanager

    @contextmanager
    def connect() -> Iterator[openai.OpenAI]:
        with (
            serving(build_app(engine)) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as connection,
        ):
            yield connection

    return connect()


def cached(answer: Any) -> dict[str, int]:
    details: dict[str, Any] = answer.usage.to_dict()["prompt_tokens_details"]
    by_tier: dict[str, int] = details["cached_tokens_by_tier"]
    assert details["cached_tokens"] == sum(by_tier.values())
    return by_tier


def empty_device(engine: Engine) -> None:
    def evicted(core: Any) -> bool:
        core.cache.evict(Tier.DEVICE)
        return all(pool.cached == 0 for pool in core.cache.stats().pools if pool.tier is Tier.DEVICE)

    wait_until(lambda: engine.call(evicted))


def test_each_tier_gives_the_same_answer_and_is_named(given: Settings) -> None:
    ids = prompt(20 * PAGE + 3)
    with running(given) as engine, connected(engine) as client:
        answers = [client.completions.create(model=MODEL, prompt=ids, **GREEDY) for _ in range(2)]
        empty_device(engine)
        answers.append(client.completions.create(model=MODEL, prompt=ids, **GREEDY))
    with running(given) as engine, connected(engine) as client:
        answers.append(client.completions.create(model=MODEL, prompt=ids, **GREEDY))
    full = 20 * PAGE
    assert [cached(answer) for answer in answers] == [
        {"device": 0, "host": 0, "storage": 0},
        {"device": full, "host": 0, "storage": 0},
        {"device": 0, "host": full, "storage": 0},
        {"device": 0, "host": 0, "storage": full},
    ]
    assert len({answer.choices[0].text for answer in answers}) == 1
    assert answers[0].choices[0].finish_reason == "length"


def test_chat_is_the_template_and_the_engine(client: Any, engine: Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, **GREEDY)
    parts = list(client.chat.completions.create(model=MODEL, messages=messages, stream=True, **GREEDY))
    text = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    tokens, last = ask(engine, ids, ANSWER, ignore_eos=True)
    assert whole.usage.prompt_tokens == len(ids)
    assert whole.usage.completion_tokens == len(tokens) == ANSWER
    assert whole.choices[0].message.content == "".join(part.choices[0].delta.content or "" for part in parts)
    assert whole.choices[0].finish_reason == parts[-1].choices[0].finish_reason == last.finish_reason == "length"


def test_seed_gives_the_same_answer_again(client: Any) -> None:
    def answer(seed: int) -> str:
        created = client.completions.create(model=MODEL, prompt="once", max_tokens=ANSWER, seed=seed)
        return str(created.choices[0].text)

    assert answer(5) == answer(5)
    assert answer(5) != answer(6)


def test_prompt_that_is_too_long_gives_the_models_numbers(client: Any, engine: Engine) -> None:
    limit = engine.max_model_len
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[1] * limit, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert str(limit) in caught.value.message
    assert client.completions.create(model=MODEL, prompt=[1] * (limit - 1), max_tokens=1).usage.completion_tokens == 1


def test_32_at_once_with_shared_prefixes_some_hanging_up(client: Any, engine: Engine) -> None:
    shared = [prompt(8 * PAGE, seed) for seed in range(3)]
    prompts = [shared[index % 3] + prompt(5 + index, 100 + index) for index in range(32)]
    # A salt of its own for each: nothing is shared, so these are what an empty cache answers.
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    alone = ["".join(c.text for c in engine.submit(ids, params, salt=f"alone {i}")) for i, ids in enumerate(prompts)]
    before = engine.stats().cache.hit_tokens

    def one(index: int) -> str:
        create = client.completions.create
        if index % 4 == 0:
            return str(create(model=MODEL, prompt=prompts[index], **GREEDY).choices[0].text)
        stream = create(model=MODEL, prompt=prompts[index], stream=True, **GREEDY)
        text = ""
        for count, chunk in enumerate(stream):
            text += chunk.choices[0].text
            if index % 4 == 1 and count == index % 5:
                stream.close()
                break
        return text

    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(one, range(32)))
    for index, answer in enumerate(answers):
        if index % 4 == 1:
            assert alone[index].startswith(answer)
        else:
            assert answer == alone[index]
    wait_until(lambda: engine.call(lambda core: not core.has_work and not core.transfers_in_flight))
    engine.call(lambda core: core.cache.audit())
    stats = engine.call(lambda core: core.cache.stats())
    assert (stats.pins, stats.open_matches, stats.in_flight) == (0, 0, 0)
    assert sum(stats.hit_tokens.values()) > sum(before.values())


def test_client_that_hangs_up_ends_the_work(client: Any, engine: Engine) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: engine.call(lambda core: not core.has_work))
    assert engine.call(lambda core: core.stats().decode_tokens) < 900


def test_metrics_and_health_of_the_real_engine(client: Any, engine: Engine) -> None:
    client.completions.create(model=MODEL, prompt=prompt(4 * PAGE), **GREEDY)
    http = client._client
    root = str(client.base_url).removesuffix("/v1/")
    assert http.get(f"{root}/health").json() == {"status": "ok", "degraded": []}
    lines = http.get(f"{root}/metrics").text.splitlines()
    assert f"hicache_prompt_tokens_total {4.0 * PAGE}" in lines
    assert "hicache_storage_attached 1.0" in lines
    assert any(line.startswith('hicache_pool_slots{pool="kv",state="cached",tier="device"}') for line in lines)
