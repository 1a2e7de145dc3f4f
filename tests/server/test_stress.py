"""Random clients against `hicache serve` with little memory: each that waits is answered rightly, and nothing stays."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from hicache.config import CacheConfig, ServeConfig, Settings
from hicache.testing.families import write_tiny
from tests.engine.tiny import running
from tests.server.fake_engine import wait_until
from tests.server.served import Footprint, Served, served
from tests.server.stress import AT_ONCE, Crowd, Talks

PAGE = 16
CONVERTED = sorted((ServeConfig().cache_folder / "models").glob("smollm2*/config.json"))
KEY = "the key of the operator"
GROWTH_BYTES = 8 << 20
"""What the second half of the requests may add to the memory that the first half has made the process take."""
SPARE_FILES = 4
"""Files of the store that may be open at one moment and not at another."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, how it is served, and how long its conversations are."""

    folder: Path
    flags: tuple[str, ...]
    words: int
    answer_tokens: int


def smollm2(home: Path) -> Subject:
    """The default model, where an earlier run has converted it."""
    if not CONVERTED:
        pytest.skip("the default model is not on this machine; hicache demo fetches it")
    sizes = ("--device-size", "8640KiB", "--host-size", "14400KiB")
    return Subject(CONVERTED[-1].parent, sizes, words=24, answer_tokens=4)


def hybrid(home: Path) -> Subject:
    """Attention, recurrent state and a draft model."""
    folder, draft = write_tiny("qwen3_next", home / "hybrid"), write_tiny("llama", home / "draft", seed=1)
    sizes = ("--device-size", "1MiB", "--host-size", "1MiB", "--checkpoint-share", "0.3")
    return Subject(folder, (*sizes, "--draft", str(draft), "--draft-tokens", "3"), words=25, answer_tokens=12)


@pytest.fixture(params=[pytest.param(smollm2, marks=pytest.mark.full), hybrid], ids=lambda make: make.__name__)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    make: Callable[[Path], Subject] = request.param
    return make(tmp_path)


@pytest.fixture
def talks(subject: Subject, tmp_path: Path) -> Talks:
    """What is asked, with the answers of an engine that has memory for everything and no other work."""
    cache = CacheConfig(device_size=256 << 20, host_size=64 << 20, page_size=PAGE)
    serve = ServeConfig(model=str(subject.folder), cache_folder=tmp_path / "unloaded", threads=1)
    with running(Settings(cache=cache, serve=serve)) as engine:
        return Talks(engine, subject.answer_tokens, words=subject.words)


@pytest.fixture
def server(subject: Subject, talks: Talks, tmp_path: Path) -> Iterator[Served]:
    flags = ("--page-size", str(PAGE), "--max-running", str(AT_ONCE), "--storage-url", f"file:{tmp_path / 'store'}")
    with served(str(subject.folder), *flags, *subject.flags, "--admin-key", KEY, home=tmp_path) as one:
        yield one


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.full)])
def test_who_waits_is_answered_and_nothing_is_left_behind(subject: Subject, talks: Talks, server: Served, count: int):
    crowd = Crowd(server.url, subject.folder.name, subject.answer_tokens)
    asks = talks.asks(count, seed=count)
    crowd.send(asks[: count // 2])
    halfway = footprint_at_rest(server)
    crowd.send(asks[count // 2 :])
    end = footprint_at_rest(server)
    assert end.resident_bytes - halfway.resident_bytes < GROWTH_BYTES
    assert end.threads <= halfway.threads + AT_ONCE
    wait_until(lambda: server.footprint().files <= halfway.files + SPARE_FILES)
    metrics = server.rest()
    assert metrics['hicache_pool_slots{pool="kv",state="cached",tier="device"}'] * PAGE < talks.running_tokens / 4
    assert metrics['hicache_failures_total{kind="failed_requests"}'] == 0
    hits = {tier: metrics[f'hicache_cache_hit_tokens_total{{tier="{tier}"}}'] for tier in ("device", "host", "storage")}
    assert hits["device"] > 0
    assert hits["host"] + hits["storage"] > 0, "what had left the device was given back"
    assert httpx.get(f"{server.url}/health", timeout=60).json() == {"status": "ok", "degraded": []}
    assert "Traceback" not in "\n".join(server.stop())


def footprint_at_rest(server: Served) -> Footprint:
    """What the process holds when nothing is under way, and every slot is accounted for."""
    server.rest()
    audit = httpx.post(f"{server.url}/admin/audit", headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    assert audit.status_code == 200, audit.text
    assert audit.json() == {"clean": True, "idle": True, "open_matches": 0, "pins": 0, "in_flight": 0}
    return server.footprint()
