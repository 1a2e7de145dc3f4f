"""A client that hangs up, whole answer or stream, has its work stopped; others go on."""

from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine, wait_until
from tests.server.test_operations import metric

MODEL = "org/fake"
GONE = 'hicache_requests_total{endpoint="/v1/completions",status="499"}'


def test_stream_left_half_way_is_aborted(client: Any, http: httpx.Client, engine: FakeEngine) -> None:
    engine.gate.clear()
    before = metric(http, GONE)
    stream = client.completions.create(model=MODEL, prompt="hello", stream=True)
    assert next(stream).choices[0].text == "H"
    stream.close()
    assert engine.streams[0].aborted.wait(10)
    wait_until(lambda: metric(http, GONE) == before + 1)


@pytest.mark.parametrize("prompt", ["hello", ["one", "two"]])
def test_whole_answer_nobody_waits_for_is_aborted(http: httpx.Client, engine: FakeEngine, prompt) -> None:
    engine.gate.clear()
    before = metric(http, GONE)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={"model": MODEL, "prompt": prompt}, timeout=0.2)
    for stream in engine.streams:
        assert stream.aborted.wait(10)
    wait_until(lambda: metric(http, GONE) == before + 1)


def test_others_go_on(client: Any, engine: FakeEngine) -> None:
    engine.gate.clear()
    left = client.completions.create(model=MODEL, prompt="left", stream=True)
    kept = client.completions.create(model=MODEL, prompt="kept", stream=True)
    next(left)
    left.close()
    assert engine.streams[0].aborted.wait(10)
    engine.gate.set()
    assert "".join(chunk.choices[0].text for chunk in kept) == "KEPT"
    assert not engine.streams[1].aborted.is_set()


def test_finished_answer_is_not_aborted(client: Any, engine: FakeEngine) -> None:
    client.completions.create(model=MODEL, prompt="hello")
    assert engine.streams[0].finished
    assert not engine.streams[0].aborted.is_set()
