"""Mooncake binds all interfaces, so its tests (`inside.py`) run in a network namespace that has only loopback."""

from pathlib import Path

import pytest

from tests.storage.netns import run_fenced


@pytest.mark.full
def test_mooncake():
    pytest.importorskip("mooncake.store", reason="the mooncake store is not installed: pip install 'hicache[mooncake]'")
    run_fenced(Path(__file__).with_name("inside.py"))
