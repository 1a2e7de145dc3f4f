"""An engine starts whole, or leaves nothing behind; settings that can't work are refused before weights are read."""

import pytest

from hicache.cache.room import most_chunk, most_slots
from hicache.coverage import Window
from hicache.engine import launch
from hicache.errors import ClosedError, ConfigError
from tests.engine.tiny import settings


def test_a_store_that_makes_no_sense_is_refused_before_the_weights_are_read(checkpoint, cache_folder, monkeypatch):
    monkeypatch.setattr(launch, "load_model", None)
    asked = settings(checkpoint, cache_folder)
    asked = asked.replace(cache=asked.cache.replace(storage_url="nosuch:./store"))
    with pytest.raises(ConfigError, match="nosuch"):
        launch.create_engine(asked)


def test_weights_that_cannot_be_read_leave_no_memory_taken(checkpoint, cache_folder, monkeypatch):
    caches = []
    build = launch.build_kv_cache

    def remember(*args, **kwargs):
        caches.append(build(*args, **kwargs))
        return caches[-1]

    def fail(folder, dtype):
        raise ConfigError("the weights are gone")

    monkeypatch.setattr(launch, "build_kv_cache", remember)
    monkeypatch.setattr(launch, "load_model", fail)
    with pytest.raises(ConfigError, match="the weights are gone"):
        launch.create_engine(settings(checkpoint, cache_folder))
    with pytest.raises(ClosedError):
        caches[0].poll()


@pytest.mark.parametrize("lookahead", range(5))
@pytest.mark.parametrize(("page", "window", "spare"), [(16, 40, 2), (16, 1, 2), (4, 9, 2), (4, 9, 5)])
@pytest.mark.parametrize("asked", [1, 16, 512])
def test_a_step_is_no_larger_than_the_windows_pool_lets_every_request_compute(lookahead, page, window, spare, asked):
    coverage = Window(window)
    slots = coverage.pages(page) + spare
    most = most_chunk({"swa": coverage}, {"swa": slots}, page, lookahead)
    chunk = launch.fitting_chunk(asked, most, page)
    assert most_slots(coverage, 10_000, chunk, page, lookahead) <= slots
    assert chunk == most or (chunk % page == 0 and chunk >= min(asked, most // page * page))


def test_a_windows_pool_without_room_beside_the_window_limits_nothing():
    assert launch.fitting_chunk(512, None, 16) == 512
    assert launch.fitting_chunk(512, -15, 16) == 16
