"""S38, one rank: a size is for all pools of a tier together, it is shown how it is split, and it is had or refused."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.builder import ModelDescription, PoolDescription, build_kv_cache, describe_sizes, with_draft
from hicache.cache import UnifiedRadixCache
from hicache.config import CacheConfig, parse_size
from hicache.coverage import Checkpoint, Coverage, Full, Window
from hicache.device.array import ArrayDevicePool
from hicache.engine import create_engine
from hicache.errors import ConfigError
from hicache.layout import PoolGeometry
from hicache.units import Tier
from tests.engine.tiny import settings, write_checkpoint
from tests.world import KINDS, PAGE, World, geometry, tokens

MIB = 1 << 20
LAYERS = 4
DEVICE_PAGES = 24


class Device:
    """A factory of device pools that counts the bytes it has made."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, name: str, made: PoolGeometry, slots: int) -> ArrayDevicePool:
        pool = ArrayDevicePool.page_first(name, made, slots)
        self.nbytes += sum(pool.layout.buffers_bytes)
        return pool


@dataclass(frozen=True)
class Shape:
    """What a cache is built from."""

    model: ModelDescription
    config: CacheConfig
    reserved: int
    live: int

    @contextmanager
    def built(self, device: Device) -> Iterator[UnifiedRadixCache]:
        cache = build_kv_cache(
            self.model, self.config, device_pool=device, reserved_slots=self.reserved, live_slots=self.live
        )
        try:
            yield cache
        finally:
            cache.close()

    def described(self) -> str:
        return describe_sizes(self.model, self.config, reserved_slots=self.reserved, live_slots=self.live)

    def with_size(self, field: str, nbytes: int) -> "Shape":
        return replace(self, config=self.config.replace(**{field: nbytes}))


def host_bytes(cache: UnifiedRadixCache) -> int:
    return sum(entry.host_pool.arena.nbytes for entry in cache.controller.mem_pool_host.entries)


def pool(draw: st.DrawFn, name: str, coverage: Coverage) -> PoolDescription:
    """A pool of any slot size, with layers of a draft packed into it or not."""
    slot_tokens = 1 if isinstance(coverage, Checkpoint) else PAGE
    packed = (
        () if slot_tokens == 1 else tuple(geometry(1, draw(st.integers(1, 9))) for _ in range(draw(st.integers(0, 2))))
    )
    return PoolDescription(name, geometry(2, draw(st.integers(1, 60)), slot_tokens), (0, 3), coverage, None, packed)


@st.composite
def models(draw: st.DrawFn) -> ModelDescription:
    """An anchor of any coverage, sidecars with slots of their own and derived ones, and a draft of one or two pools."""
    coverages = st.one_of(st.just(Full()), st.just(Checkpoint()), st.integers(1, 40).map(Window))
    pools = [pool(draw, f"pool{index}", draw(coverages)) for index in range(draw(st.integers(1, 4)))]
    for source in list(pools):
        if draw(st.booleans()) and not isinstance(source.coverage, Checkpoint):
            derived = geometry(1, draw(st.integers(1, 30)))
            pools.append(PoolDescription(f"{source.name}_more", derived, (1,), derived_from=source.name))
    model = ModelDescription(LAYERS, tuple(pools))
    if not draw(st.booleans()):
        return model
    parts = [pool(draw, f"part{index}", Full()) for index in range(draw(st.integers(1, 2)))]
    return with_draft(model, ModelDescription(LAYERS, tuple(replace(part, packed_drafts=()) for part in parts)))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    sizes = st.integers(1, 40_000)
    ratio, share = draw(st.floats(0.01, 1)), draw(st.floats(0.01, 0.99))
    config = CacheConfig(
        device_size=draw(sizes), host_size=draw(sizes), page_size=PAGE, window_ratio=ratio, checkpoint_share=share
    )
    return Shape(draw(models()), config, draw(st.integers(0, 3)), draw(st.integers(1, 6)))


def roomy(shape: Shape) -> Shape:
    """The same with as much as its refusals ask for, where it is refused."""
    for _ in Tier.DEVICE, Tier.HOST:
        try:
            shape.described()
        except ConfigError as refusal:
            found = re.match(r"(\w+)=.* give it (\w+) or more", str(refusal))
            assert found is not None, refusal
            shape = shape.with_size(found[1], parse_size(found[2]))
    return shape


@given(shapes())
def test_all_pools_of_a_tier_together_take_no_more_than_its_size(drawn: Shape):
    shape, device = roomy(drawn), Device()
    with shape.built(device) as cache:
        assert device.nbytes <= shape.config.device_size
        assert host_bytes(cache) <= shape.config.host_size


@given(shapes())
def test_the_split_and_its_total_are_what_is_taken(drawn: Shape):
    shape, device = roomy(drawn), Device()
    lines = shape.described().splitlines()
    with shape.built(device) as cache:
        taken = {"device": device.nbytes, "host": host_bytes(cache)}
    for tier, nbytes in taken.items():
        parts = [line for line in lines if line.startswith(f"{tier} ") and not line.startswith(f"{tier} in all")]
        assert [line.split(":")[0] for line in parts] == [f"{tier} {one.name}" for one in shape.model.pools]
        assert sum(parse_size(line.rpartition(", ")[2]) for line in parts) == nbytes
        (total,) = re.findall(rf"^{tier} in all: (\w+) of (\w+)$", "\n".join(lines), re.MULTILINE)
        asked = shape.config.device_size if tier == "device" else shape.config.host_size
        assert [parse_size(size) for size in total] == [nbytes, asked]


DRAFTED = with_draft(KINDS["everything"], ModelDescription(1, (PoolDescription("kv", geometry(1, 6), (0,)),)))
SHAPE = Shape(DRAFTED, CacheConfig(device_size=2 * MIB, host_size=3 * MIB, page_size=PAGE), 1, 2)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails as soon as host memory is mapped."""

    def mapped(nbytes: int, descriptor: int | None) -> None:
        raise AssertionError(f"{nbytes} bytes were mapped")

    monkeypatch.setattr("hicache.memory._map", mapped)


def limit(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """A cgroup that leaves so much."""
    monkeypatch.setattr("hicache.memory._cgroup_available", lambda root: [nbytes])
    monkeypatch.setattr("hicache.memory._promised_bytes", lambda: 0)


def test_a_cgroup_that_leaves_less_is_told_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch, untouched: None):
    limit(monkeypatch, 5 * MIB - 1)
    device = Device()
    with pytest.raises(ConfigError) as refusal, SHAPE.built(device):
        pass
    assert str(refusal.value) == (
        f"device_size and host_size together: {5 * MIB} bytes (5.00 MiB) asked, but {5 * MIB - 1} bytes (5.00 MiB)"
        " can be had here; set a smaller size or raise the memory limit"
    )
    assert device.nbytes == 0


def test_memory_of_a_device_of_its_own_does_not_count(monkeypatch: pytest.MonkeyPatch, untouched: None):
    limit(monkeypatch, 3 * MIB - 1)
    device = Device()
    with pytest.raises(ConfigError, match=rf"^host_size: {3 * MIB} bytes .* asked, but {3 * MIB - 1} bytes"):
        build_kv_cache(SHAPE.model, SHAPE.config, device_pool=device, device_in_host_memory=False)
    assert device.nbytes == 0


def test_a_cgroup_that_leaves_just_enough_is_enough(monkeypatch: pytest.MonkeyPatch):
    limit(monkeypatch, 5 * MIB)
    with SHAPE.built(Device()) as cache:
        cache.audit()


def test_a_server_counts_the_weights_too_and_reads_none_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path, untouched):
    given = settings(write_checkpoint(tmp_path / "tiny"), tmp_path)
    limit(monkeypatch, given.cache.device_size + given.cache.host_size)
    with pytest.raises(ConfigError, match=r"^the model's weights, device_size and host_size together: .* raise the"):
        create_engine(given)


@pytest.mark.parametrize("field", ["device_size", "host_size"])
def test_a_tier_too_small_for_one_of_each_names_the_size_that_would_do(field: str, untouched: None):
    device = Device()
    refused = pytest.raises(ConfigError, match=rf"^{field}=100B holds less than .*; give it \w+ or more")
    with refused, SHAPE.with_size(field, 100).built(device):
        pass
    assert device.nbytes == 0


def least_host_pages(model: str) -> int:
    """The fewest pages of all pools that a host can hold and be accepted: one, or a window where all pools have one."""

    def accepted(pages: int) -> bool:
        try:
            World(KINDS[model], host_pages=pages).cache.close()
        except ConfigError as refusal:
            assert str(refusal).startswith("host_size=")
            return False
        return True

    return next(pages for pages in range(1, DEVICE_PAGES) if accepted(pages))


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("more_pages", [0, 3])
@pytest.mark.parametrize("model", sorted(KINDS))
def test_a_host_smaller_than_the_device_serves(model: str, more_pages: int, policy: str):
    host_pages = least_host_pages(model) + more_pages
    assert host_pages < DEVICE_PAGES / 2
    world = World(KINDS[model], device_pages=DEVICE_PAGES, host_pages=host_pages, write_policy=policy)
    prompts = [tokens(*range(start, start + 6 * PAGE + 1)) for start in range(0, 6000, 1000)]
    for prompt in (*prompts, *prompts):
        match = world.prefill(prompt)
        world.check(match)
        assert world.texts[match] == prompt
        world.cache.release(match)
        world.settle()
    assert world.cached(prompts[-1])[0] > 0
    world.idle()
    world.cache.close()
