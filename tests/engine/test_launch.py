"""An engine starts whole, or leaves nothing behind; settings that can't work are refused before weights are read."""

import pytest

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
