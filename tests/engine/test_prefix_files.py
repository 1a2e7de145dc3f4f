"""A running engine gives a prefix away and takes it in: the answer is the one that was computed."""

from pathlib import Path

import pytest

from hicache.errors import CapacityError, ConfigError
from hicache.units import Tier
from tests.engine.tiny import ask, prompt, running, settings, write_checkpoint

PROMPT = prompt(43, seed=3)


def test_a_prefix_goes_from_one_engine_to_another(tmp_path: Path):
    folder, path = write_checkpoint(tmp_path / "tiny"), tmp_path / "prefix"
    with running(settings(folder, tmp_path)) as engine:
        with pytest.raises(CapacityError):
            engine.export_prefix(PROMPT, path)
        right, _ = ask(engine, PROMPT)
        pages = engine.export_prefix(PROMPT, path)
    assert pages > 1
    with running(settings(folder, tmp_path)) as engine:
        with pytest.raises(ConfigError, match="another salt"):
            engine.import_prefix(path, "pepper")
        assert engine.import_prefix(path).pages == pages
        assert ask(engine, PROMPT)[0] == right
        hits = engine.call(lambda core: core.cache.stats().hit_tokens)
        assert hits[Tier.HOST] == pages * engine.call(lambda core: core.cache.page_size)
        engine.audit()
