"""Any thread may submit, read and abort; the engine answers all, closes cleanly, and says so when it has stopped."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache.engine import Ask, Engine, SamplingParams
from hicache.errors import CapacityError, ClosedError, ConfigError, InvariantError, QueueFullError
from hicache.units import Tier
from tests.engine.bench import mixed_prompts
from tests.engine.tiny import ask, collect, prompt, running, settings


def idle(engine: Engine) -> None:
    """Raises unless the cache is clean once transfers have settled."""
    while engine.call(lambda core: core.transfers_in_flight):
        pass
    engine.call(lambda core: core.cache.audit())
    stats = engine.call(lambda core: core.cache.stats())
    assert (stats.pins, stats.open_matches) == (0, 0)


def test_an_answer_comes_in_chunks_with_the_time_of_the_first(engine):
    chunks = list(engine.submit(prompt(20), SamplingParams(max_tokens=5)))
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 5
    assert [chunk.ttft_s is not None for chunk in chunks] == [True, False, False, False, False]
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].usage.prompt_tokens == 20
    assert chunks[-1].usage.completion_tokens == 5


def test_32_at_once_some_aborted_half_way_equal_one_by_one(checkpoint, cache_folder):
    prompts = mixed_prompts(32, seed=4)
    with running(settings(checkpoint, cache_folder)) as calm:
        expected = [ask(calm, ids, 10, seed=7, temperature=0.7 * (i % 2))[0] for i, ids in enumerate(prompts)]
    with running(settings(checkpoint, cache_folder, device_size=80 * 6144, max_running=8)) as engine:
        answers: dict[int, tuple] = {}

        def client(index: int) -> None:
            params = SamplingParams(max_tokens=10, seed=7, temperature=0.7 * (index % 2))
            stream = engine.submit(prompts[index], params)
            chunks = iter(stream)
            got = []
            for chunk in chunks:
                got.append(chunk)
                if index % 5 == 0 and len(got) == 3:
                    stream.abort()
            answers[index] = collect(got)

        threads = [threading.Thread(target=client, args=(index,)) for index in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for index in range(32):
            tokens, last = answers[index]
            if last.finish_reason == "abort":
                assert index % 5 == 0
            assert tokens == expected[index][: len(tokens)]
            assert index % 5 == 0 or len(tokens) == len(expected[index])
        idle(engine)


def test_async_streams_interleave(engine):
    async def read(ids: list[int]) -> list[int]:
        return [t async for chunk in engine.submit(ids, SamplingParams(max_tokens=8)) for t in chunk.token_ids]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(read(prompt(10, seed=seed)) for seed in range(4)))

    together = asyncio.run(main())
    assert together == [ask(engine, prompt(10, seed=seed))[0] for seed in range(4)]


def test_a_consumer_whose_loop_is_gone_does_not_stop_the_engine(engine):
    async def leave() -> None:
        stream = engine.submit(prompt(10), SamplingParams(max_tokens=300))
        async for _ in stream:
            break

    asyncio.run(leave())
    assert ask(engine, prompt(10))[1].finish_reason == "length"


def test_abort_after_the_end_is_harmless(engine):
    stream = engine.submit(prompt(10), SamplingParams(max_tokens=2))
    collect(stream)
    stream.abort()
    stream.abort()
    idle(engine)


def test_what_can_never_fit_is_refused_with_need_and_limit(checkpoint, cache_folder):
    with running(settings(checkpoint, cache_folder, max_model_len=50)) as engine:
        with pytest.raises(CapacityError, match=r"45 prompt tokens and max_tokens=6 need 51 tokens.* 50"):
            engine.submit(prompt(45), SamplingParams(max_tokens=6))
        assert ask(engine, prompt(45), 5)[1].finish_reason == "length"


def test_the_pool_limits_the_length_when_it_is_smaller_than_the_model_allows(checkpoint, cache_folder):
    with running(settings(checkpoint, cache_folder, device_size=12 * 6144)) as engine:
        assert engine.max_model_len == 80
        assert ask(engine, prompt(72), 8)[1].finish_reason == "length"


@pytest.mark.parametrize(("ids", "message"), [([], "no tokens"), ([5, 300], "5 to 300; 0 to 299"), ([-1], "-1")])
def test_a_prompt_that_makes_no_sense_is_refused(engine, ids, message):
    with pytest.raises(ConfigError, match=message):
        engine.submit(ids, SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 4000}, r"max_model_len=4000: the model was made for 2048 at most"),
        ({"max_model_len": 1700}, r"max_model_len=1700: device_size=.* holds 1600 tokens; give it .* or more"),
        ({"device_size": 1000}, "device_size"),
        ({"host_size": 1 << 50}, "host_size"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_at_start(checkpoint, cache_folder, changes, message):
    with pytest.raises(ConfigError, match=message), running(settings(checkpoint, cache_folder, **changes)):
        pass


def test_a_full_queue_refuses_one_more_and_keeps_what_it_has(checkpoint, cache_folder):
    with running(settings(checkpoint, cache_folder, max_running=1, max_waiting=2)) as engine:
        asks = [Ask(prompt(10, seed=seed), SamplingParams(max_tokens=200, ignore_eos=True)) for seed in range(4)]
        first = engine.submit_all(asks[:1])
        next(iter(first[0]))
        waiting = engine.submit_all(asks[1:3])
        for refused in (asks[3:], asks[2:]):
            with pytest.raises(QueueFullError, match="2 requests wait, and the queue holds 2") as caught:
                engine.submit_all(refused)
            assert caught.value.retry_after_s >= 1
        with pytest.raises(CapacityError, match="4 prompts at once"):
            engine.submit_all(asks)
        assert (engine.stats().queued, engine.stats().refused) == (2, 3)
        waiting[0].abort()
        assert collect(waiting[0])[1].finish_reason == "abort"
        waiting += engine.submit_all(asks[3:])
        first[0].abort()
        assert [collect(stream)[1].finish_reason for stream in waiting[1:]] == ["length"] * 2
        assert engine.stats().queued == 0


def test_prompts_that_come_together_start_together_or_not_at_all(engine):
    bad = Ask([5, 300], SamplingParams(max_tokens=1))
    with pytest.raises(ConfigError, match="5 to 300"):
        engine.submit_all([Ask(prompt(10), SamplingParams(max_tokens=1)), bad])
    assert engine.stats().queued == 0
    idle(engine)
    assert engine.stats().core.finished_requests == 0


def test_close_ends_what_runs_and_later_use_says_closed(checkpoint, cache_folder):
    with running(settings(checkpoint, cache_folder)) as engine:
        streams = [engine.submit(prompt(10, seed=seed), SamplingParams(max_tokens=500)) for seed in range(3)]
        next(iter(streams[0]))
        engine.close()
        assert [collect(stream)[1].finish_reason for stream in streams] == ["abort"] * 3
        with pytest.raises(ClosedError):
            engine.submit(prompt(10), SamplingParams(max_tokens=1))
        with pytest.raises(ClosedError):
            engine.call(lambda core: None)
        engine.close()


def test_a_bug_stops_the_engine_visibly(checkpoint, cache_folder):
    with running(settings(checkpoint, cache_folder)) as engine:
        assert engine.alive
        stream = engine.submit(prompt(10), SamplingParams(max_tokens=500))

        def bug(core):
            raise InvariantError("two owners")

        with pytest.raises(InvariantError):
            engine.call(bug)
        last = collect(stream)[1]
        assert last.finish_reason == "error"
        assert last.error is not None and "two owners" in last.error
        assert "two owners" in engine.health()[0]
        assert not engine.alive
        with pytest.raises(ClosedError, match="two owners"):
            engine.submit(prompt(10), SamplingParams(max_tokens=1))


def test_who_waits_for_an_engine_that_stops_is_told(checkpoint, cache_folder):
    entered, go_on = threading.Event(), threading.Event()

    def bug(core):
        entered.set()
        go_on.wait(10)
        raise InvariantError("two owners")

    with running(settings(checkpoint, cache_folder)) as engine, ThreadPoolExecutor(2) as callers:
        first = callers.submit(engine.call, bug)
        entered.wait(10)
        stream = engine.submit(prompt(10), SamplingParams(max_tokens=5))
        second = callers.submit(engine.call, lambda core: None, 10)
        while len(engine._inbox) < 2:
            pass
        go_on.set()
        assert isinstance(first.exception(10), InvariantError)
        assert isinstance(second.exception(10), ClosedError)
        assert collect(stream)[1].finish_reason == "error"


def test_an_error_in_a_call_is_the_callers(engine):
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda core: 1 / 0)
    assert ask(engine, prompt(10))[1].finish_reason == "length"


def test_a_store_that_cannot_be_opened_is_named_by_health(checkpoint, cache_folder, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with running(settings(checkpoint, cache_folder, storage_url=f"file:{tmp_path}/file/store")) as engine:
        assert len(engine.health()) == 1
        assert ask(engine, prompt(10))[1].finish_reason == "length"


def test_another_engine_finds_the_pages_in_the_store(checkpoint, cache_folder, tmp_path):
    ids, store = prompt(100), f"file:{tmp_path}/store"
    with running(settings(checkpoint, cache_folder, storage_url=store)) as engine:
        cold, _ = ask(engine, ids)
        idle(engine)
    with running(settings(checkpoint, cache_folder, storage_url=store)) as engine:
        warm, last = ask(engine, ids)
        assert warm == cold
        assert last.usage is not None and dict(last.usage.cached_tokens) == {"device": 0, "host": 0, "storage": 96}


def test_stats_are_the_cores_and_the_caches(engine):
    ask(engine, prompt(20), 4)
    assert engine.call(lambda core: core.stats()).finished_requests == 1
    assert engine.stats().cache.pools[0].tier is Tier.DEVICE
    assert engine.info.exact
